"""How vLLM's servers are asked for completions."""

from __future__ import annotations

from typing import Any, Final

from rlplug.interfaces import EngineFault
from rlplug.rollout.servers.requests import Job, RequestAdapter
from rlplug.types import Completion
from rlplug_rollout_vllm.sampling import to_completion

FINAL_ONLY: Final = 2
"""vLLM's ``RequestOutputKind``: without it, 0.26 puts the whole completion together anew for every token. Requests
whose tokens are streamed get others."""


class VLLMDialect(RequestAdapter):
    """Token ids in and out."""

    engine = "vLLM"
    route = "inference/v1/generate"

    def question(self, job: Job) -> dict[str, Any]:
        return {
            "token_ids": job.request.prompt_ids,
            "sampling_params": {**job.arguments, "output_kind": FINAL_ONLY},
            "stream": job.is_streamed,
        }

    def receive(self, job: Job, answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            token_ids = choice["token_ids"] or []
            content = (choice["logprobs"] or {}).get("content") or []
            if len(content) != len(token_ids):
                raise EngineFault(f"{job.url} gave {len(content)} logprobs for {len(token_ids)} tokens.")
            job.token_ids += token_ids
            job.logprobs += [float(entry["logprob"]) for entry in content]
            job.finish_reason = choice["finish_reason"]

    def completion(self, job: Job) -> Completion:
        return to_completion(job.request.request_id, job.token_ids, job.logprobs, job.finish_reason, job.version)
