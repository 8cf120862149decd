"""Requests in a vLLM of this process, which moves only while it is stepped."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info

from rlplug.distributed.rng import preserved_rng
from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.rollout.engines import EngineStats, max_completion_tokens
from rlplug.types import NO_VERSION, Completion, Request, SamplingParams
from rlplug_rollout_vllm.sampling import sampling_arguments, to_completion

PROGRESS_S: Final = 30.0

QUIET_STEPS: Final = 4
"""Steps after which an engine without requests has let the memory of aborted ones go."""


class EngineRequests:
    """Adds requests to an engine, steps it, and keeps completions until they are asked for.

    Requests of ``generate`` and those that were submitted run side by side.

    Args:
        engine: vLLM's ``LLMEngine``.
        deadline_s: How long the engine may work on a request; a longer one counts as a fault.
    """

    def __init__(
        self, engine: Any, policy: PolicySpec, max_model_len: int, stats: EngineStats, deadline_s: float
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._max_model_len = max_model_len
        self._stats = stats
        self.deadline_s = deadline_s
        self._version = NO_VERSION
        self._seconds = 0.0
        """How long the engine has worked."""
        self._waiting: dict[str, float] = {}
        """What was submitted and is not done, oldest first: how long the engine had worked then."""
        self._ready: list[Completion] = []
        self._arrivals: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return the completions of ``requests``, in their order."""
        rooms = self._rooms(requests)
        finished: dict[str, Completion] = {}
        with self._failures(finished.values, len(requests)):
            self._add(requests, sampling, rooms)
            missing, began, next_line_s = {request.request_id for request in requests}, self._seconds, PROGRESS_S
            while missing:
                self._take_arrivals()
                finished |= {completion.request_id: completion for completion in self._step()}
                missing -= finished.keys()
                seconds = self._seconds - began
                self._check_deadline(seconds)
                if seconds > next_line_s:
                    next_line_s += PROGRESS_S
                    rank_zero_info(f"rollout: {len(finished)} of {len(requests)} completions after {seconds:.0f} s")
        return [finished[request.request_id] for request in requests]

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Hand requests in, from any thread; they run while others are collected or generated."""
        rooms = self._rooms(requests)

        def add() -> None:
            self._waiting |= dict.fromkeys((request.request_id for request in requests), self._seconds)
            self._add(requests, sampling, rooms)

        self._arrivals.put(add)

    def collect(self, timeout_s: float) -> list[Completion]:
        """Step until a submitted request is done, or the time is over."""
        deadline = time.perf_counter() + timeout_s
        with self._failures(self._take):
            while True:
                self._take_arrivals(0.0 if self._waiting or self._ready else deadline - time.perf_counter())
                if self._ready or time.perf_counter() >= deadline:
                    return self._take()
                if self._waiting:
                    others = self._step()
                    assert not others, "what was not submitted is done when its call of generate returns"
                    self._check_deadline(self._seconds - next(iter(self._waiting.values()), self._seconds))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop submitted requests, from any thread; what they have is collected. What is done is left alone."""
        self._arrivals.put(lambda: self._stop(request_ids))

    def start_version(self, version: int) -> None:
        """Forget what was computed with the weights of before; completions carry ``version`` from now on.

        Raises:
            EngineFault: Requests still run.
        """
        # blocks of requests that were aborted are held until the next steps
        for _ in range(QUIET_STEPS):
            if self._engine.reset_prefix_cache():
                self._version = version
                return
            if not self._waiting:
                self._engine.step()
        raise EngineFault(
            f"vLLM could not reset its prefix cache: {len(self._waiting)} requests that were submitted still run, and "
            "new weights must wait until they are collected or aborted."
        )

    # ---- the engine: only in the thread that generates or collects --------------------------------------------------

    def _take_arrivals(self, timeout_s: float = 0.0) -> None:
        """Do what other calls left to be done, waiting for the first of it."""
        try:
            self._arrivals.get(timeout=max(timeout_s, 0.0))()
            while True:
                self._arrivals.get_nowait()()
        except queue.Empty:
            return

    def _stop(self, request_ids: Sequence[str]) -> None:
        ids = [request_id for request_id in request_ids if self._waiting.pop(request_id, None) is not None]
        outputs = [self._output_so_far(request_id) for request_id in ids]
        self._engine.abort_request(ids)
        self._ready += [self._completion(output) for output in outputs]

    def _rooms(self, requests: Sequence[Request]) -> list[int]:
        return [
            max_completion_tokens(request, self._policy, self._max_model_len, "max_model_len") for request in requests
        ]

    def _add(self, requests: Sequence[Request], sampling: SamplingParams, rooms: Sequence[int]) -> None:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        for request, room in zip(requests, rooms, strict=True):
            arguments = sampling_arguments(request, sampling, self._policy, room)
            # else each step puts all completions together anew, and makes a dict for each token's logprob
            arguments |= {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
            prompt = tokens_input(list(request.prompt_ids))
            self._engine.add_request(request.request_id, prompt, VLLMSamplingParams(**arguments))

    def _step(self) -> list[Completion]:
        """Step once; return what finished of ``generate``, and keep what was submitted."""
        began = time.perf_counter()
        completions = [self._completion(output) for output in self._engine.step() if output.finished]
        seconds = time.perf_counter() - began
        self._seconds += seconds
        self._stats.seconds += seconds
        others: list[Completion] = []
        for completion in completions:
            is_submitted = self._waiting.pop(completion.request_id, None) is not None
            (self._ready if is_submitted else others).append(completion)
        return others

    def _check_deadline(self, seconds: float) -> None:
        if seconds > self.deadline_s:
            raise TimeoutError(f"it took longer than rollout.generate_deadline_s {self.deadline_s:g}")

    def _output_so_far(self, request_id: str) -> Any:
        """Return a running request's output, as vLLM itself makes it of one that is aborted."""
        from vllm.v1.engine import FinishReason

        processor = self._engine.output_processor
        (internal_id,) = processor.external_req_ids[request_id]
        state = processor.request_states[internal_id]
        return state.make_request_output([], None, FinishReason.ABORT, None)

    def _completion(self, output: Any) -> Completion:
        (generated,) = output.outputs
        token_ids, logprobs = generated.token_ids, generated.logprobs
        assert logprobs.token_ids == list(token_ids), "there is one logprob for each token, of that token"
        self._stats.num_tokens += len(token_ids)
        self._stats.prompt_tokens += len(output.prompt_token_ids)
        self._stats.cached_prompt_tokens += output.num_cached_tokens or 0
        return to_completion(output.request_id, token_ids, logprobs.logprobs, generated.finish_reason, self._version)

    def _take(self) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    @contextmanager
    def _failures(self, done: Callable[[], Iterable[Completion]], num_requests: int = 0) -> Iterator[None]:
        """Raise what goes wrong in the engine as ``EngineFault``, with what is done."""
        try:
            with preserved_rng():
                yield
        except torch.AcceleratorError as problem:
            raise RunError(f"vLLM lost its GPU, and the trainer with it, which shares it: {problem}") from problem
        except Exception as problem:
            completions = list(done())
            total = num_requests or len(completions) + len(self._waiting)
            message = (
                f"vLLM has {len(completions)} of {total} completions and failed: {type(problem).__name__}: {problem}."
            )
            raise EngineFault(message, completions) from problem
