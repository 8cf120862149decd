"""How SGLang's servers are asked for completions."""

from __future__ import annotations

from typing import Any

from rlplug.interfaces import EngineFault
from rlplug.rollout.servers.requests import Job, RequestAdapter
from rlplug.types import Completion
from rlplug_rollout_sglang.sampling import Output, to_completion


class SGLangDialect(RequestAdapter):
    """Token ids in and out of ``/generate``; a stream's events have the tokens since the one before."""

    engine = "SGLang"
    route = "generate"

    def question(self, job: Job) -> dict[str, Any]:
        return {
            "rid": job.name,
            "input_ids": job.request.prompt_ids,
            "sampling_params": job.arguments,
            "return_logprob": True,
            "stream": job.is_streamed,
        }

    def receive(self, job: Job, answer: dict[str, Any]) -> None:
        about, token_ids = answer["meta_info"], answer["output_ids"]
        reason = about["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise EngineFault(f"{job.url} gave a request up: {reason.get('message')}")
        scored = about["output_token_logprobs"]
        if [int(entry[1]) for entry in scored] != token_ids:
            raise EngineFault(f"{job.url} gave {len(scored)} logprobs of other tokens than its {len(token_ids)}.")
        job.token_ids += token_ids
        job.logprobs += [float(entry[0]) for entry in scored]
        job.finish_reason = None if reason is None else reason["type"]
        job.weight_version = about["weight_version"]
        job.cached_prompt_tokens = about["cached_tokens"]
        job.preemptions = about["num_retractions"]

    def completion(self, job: Job) -> Completion:
        # one that was aborted before its first token is of no weights
        weight_version = str(job.version) if job.weight_version is None else job.weight_version
        output = Output(
            token_ids=tuple(job.token_ids),
            logprobs=tuple(job.logprobs),
            finish_reason=str(job.finish_reason),
            weight_version=weight_version,
            prompt_tokens=len(job.request.prompt_ids),
            cached_tokens=job.cached_prompt_tokens or 0,
            retractions=job.preemptions,
        )
        return to_completion(job.request, job.sampling, output, job.arguments["stop_token_ids"], job.version)

    def abort(self, job: Job) -> tuple[str, dict[str, Any]]:
        # without this, it would notice the closed connection two seconds later
        return "abort_request", {"rid": job.name}
