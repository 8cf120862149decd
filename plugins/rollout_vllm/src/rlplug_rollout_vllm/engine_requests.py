"""Requests to vLLM, and those in an engine of this process, which moves only while it is stepped."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import torch
from rlplug_engines.colocated import (
    EngineRequests,
    EngineStats,
    RunningRequest,
    arrivals,
    as_finish_reason,
    experts_of_request,
    preserved_rng,
    recursion_limit_kept,
)

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.types import Completion, Request, SamplingParams

SAMPLING_EXTRA: Final = frozenset(
    (
        *("allowed_token_ids", "extra_args", "frequency_penalty", "min_p", "presence_penalty", "repetition_penalty"),
        *("thinking_token_budget",),
    )
)
"""Fields of vLLM's ``SamplingParams`` that ``sampling.extra`` may have: its processed logprobs are after all of them.
Left out are those that rlplug sets, that need a tokenizer, or that a request with few tokens left refuses."""
QUIET_STEPS: Final = 4
"""Steps after which an engine without requests has let the memory of aborted ones go."""


def sampling_arguments(request: Request, sampling: SamplingParams, policy: PolicySpec, room: int) -> dict[str, Any]:
    """Return the arguments of vLLM's ``SamplingParams`` for one request, as plain data."""
    arguments = {
        **sampling.extra,
        "max_tokens": min(request.limit(sampling), room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": request.seed,
        "stop_token_ids": list(policy.eos_token_ids),
        "ignore_eos": True,  # the end tokens are stop_token_ids
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(policy.stop),
    }
    if policy.stop:
        arguments |= {"stop": list(policy.stop), "skip_special_tokens": False, "spaces_between_special_tokens": False}
    return arguments


class VLLMRequests(EngineRequests[Any]):
    """Adds requests to an engine, and steps it while somebody waits.

    Times are those that the engine worked: what nobody waits for does not run, and misses no deadline.

    Args:
        engine: vLLM's ``LLMEngine``. Only the thread that generates or collects touches it.
    """

    engine: ClassVar[str] = "vLLM"
    context_key: ClassVar[str] = "max_model_len"

    def __init__(self, engine: Any, policy: PolicySpec, context: int, stats: EngineStats, deadline_s: float) -> None:
        super().__init__(policy, context, stats, deadline_s)
        self._engine = engine
        self._adapter: Any = None
        """vLLM's ``LoRARequest`` of the adapters that requests are computed with; ``None`` without adapters."""
        self._seconds = 0.0
        self._inside: set[str] = set()
        """Names of the requests that the engine has."""
        self._arrivals: queue.SimpleQueue[Callable[[], list[Any]]] = queue.SimpleQueue()
        """What other calls left to be done; each returns the outputs of what it stopped."""

    def clock(self) -> float:
        return self._seconds

    def start(self, requests: Sequence[RunningRequest]) -> None:
        self._arrivals.put(lambda: self._add(requests))

    def stop(self, requests: Sequence[RunningRequest]) -> None:
        self._arrivals.put(lambda: self._stop([running.name for running in requests]))

    def poll(self, timeout_s: float) -> list[tuple[str, Any]]:
        waits_s = 0.0 if self._inside else timeout_s
        outputs = [output for arrival in arrivals(self._arrivals, waits_s) for output in arrival()]
        if self._inside and not outputs and timeout_s > 0:
            began = time.perf_counter()
            outputs = [output for output in self._engine.step() if output.finished]
            self._seconds += time.perf_counter() - began
        self._inside -= {output.request_id for output in outputs}
        return [(output.request_id, output) for output in outputs]

    def read(self, running: RunningRequest, answer: Any) -> Completion:
        (generated,) = answer.outputs
        token_ids, logprobs = generated.token_ids, generated.logprobs
        assert logprobs.token_ids == list(token_ids), "there is one logprob for each token, of that token"
        self.stats.prompt_tokens += len(answer.prompt_token_ids)
        self.stats.cached_prompt_tokens += answer.num_cached_tokens or 0
        name = running.request.request_id
        reason = as_finish_reason(self.engine, name, generated.finish_reason)
        experts = None
        if self.policy.routers is not None:
            num_tokens = len(answer.prompt_token_ids) + len(token_ids)
            experts = experts_of_request(
                f"vLLM, at request {name},", generated.routed_experts, num_tokens, self.policy.routers
            )
        return Completion(name, token_ids, logprobs.logprobs, reason, self.version, experts)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Leave the trainer's random generators and recursion limit alone, and raise the engine's errors as faults."""
        try:
            with preserved_rng(), recursion_limit_kept():
                yield
        except torch.AcceleratorError as problem:
            raise RunError(f"vLLM lost its GPU, and the trainer with it, which shares it: {problem}") from problem
        except (EngineFault, RunError):
            raise
        except Exception as problem:
            raise EngineFault(f"{type(problem).__name__}: {problem}.") from problem

    def start_version(self, version: int, adapter: Any = None) -> None:
        """Forget what was computed with the weights of before; completions carry ``version`` from now on.

        Args:
            version: Version of the policy.
            adapter: vLLM's ``LoRARequest`` of the adapters that requests are computed with, if there are any.

        Raises:
            EngineFault: Requests still run.
        """
        # blocks of requests that were aborted are held until the next steps
        for _ in range(QUIET_STEPS):
            if self._engine.reset_prefix_cache():
                self.version, self._adapter = version, adapter
                return
            if not self._inside:
                self._engine.step()
        raise EngineFault(
            f"vLLM could not reset its prefix cache: {len(self._inside)} requests that were submitted still run, and "
            "new weights must wait until they are collected or aborted."
        )

    def _add(self, requests: Sequence[RunningRequest]) -> list[Any]:  # this and _stop: in the thread that collects
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        for running in requests:
            arguments = sampling_arguments(running.request, running.sampling, self.policy, running.max_tokens)
            # else each step puts all completions together anew, and makes a dict for each token's logprob
            arguments |= {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
            try:
                parameters = VLLMSamplingParams(**arguments)
            except Exception as problem:
                raise RunError(f"vLLM refuses what model.sampling asks for: {problem}") from problem
            prompt = tokens_input(list(running.request.prompt_ids))
            self._engine.add_request(running.name, prompt, parameters, lora_request=self._adapter)
            self._inside.add(running.name)
        return []

    def _stop(self, names: Sequence[str]) -> list[Any]:
        """End requests, and return what they have, as vLLM itself makes it of one that is aborted."""
        from vllm.v1.engine import FinishReason

        inside, processor = [name for name in names if name in self._inside], self._engine.output_processor
        internal_ids = [internal_id for (internal_id,) in map(processor.external_req_ids.__getitem__, inside)]
        states = [processor.request_states[internal_id] for internal_id in internal_ids]
        outputs = [state.make_request_output([], None, FinishReason.ABORT, None) for state in states]
        self._engine.abort_request(inside)
        self._inside -= set(inside)
        return outputs
