"""Requests in SGLang's process, and their completions until they are asked for."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning.pytorch.utilities import rank_zero_info

from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.rollout.engines import EngineStats, max_completion_tokens
from rlplug.types import NO_VERSION, Completion, Request, SamplingParams
from rlplug_rollout_sglang.engine_process import EngineProcess
from rlplug_rollout_sglang.sampling import Output, sampling_arguments, to_completion

PROGRESS_S: Final = 30.0
WAIT_S: Final = 1.0
"""How often a wait looks at its deadline."""


@dataclass(frozen=True)
class Asked:
    """A request that runs."""

    request: Request
    sampling: SamplingParams
    is_submitted: bool
    since: float


class EngineRequests:
    """Hands requests in, and sorts what comes back.

    Requests of ``generate`` and those that were submitted run side by side.

    Args:
        process: SGLang's.
        context: Of the engine: prompt and completion together, in tokens.
        deadline_s: How long a request may take; a longer one counts as a fault.
    """

    def __init__(
        self, process: EngineProcess, policy: PolicySpec, context: int, stats: EngineStats, deadline_s: float
    ) -> None:
        self._process = process
        self._policy = policy
        self._context = context
        self._stats = stats
        self.deadline_s = deadline_s
        self.version = NO_VERSION
        """Of the policy that the engine has."""
        self._numbers = itertools.count()
        self._running: dict[str, Asked] = {}
        """By the name that SGLang has for a request, oldest first: the trainer's own may come twice."""
        self._lock = threading.Lock()
        self._ready: list[Completion] = []
        self._busy_since: float | None = None

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Return the completions of ``requests``, in their order.

        Raises:
            EngineFault: SGLang failed, or took too long; it has what was finished.
        """
        names = self._hand_in(requests, sampling, is_submitted=False)
        finished: dict[str, Completion] = {}
        began, next_line_s = time.perf_counter(), PROGRESS_S
        try:
            while len(finished) < len(names):
                finished |= self._take(WAIT_S)
                self._check_deadline()
                seconds = time.perf_counter() - began
                if seconds > next_line_s:
                    next_line_s += PROGRESS_S
                    rank_zero_info(f"rollout: {len(finished)} of {len(requests)} completions after {seconds:.0f} s")
        except EngineFault as fault:
            message = f"SGLang has {len(finished)} of {len(requests)} completions and failed: {fault}"
            raise EngineFault(message, list(finished.values())) from fault
        return [finished[name] for name in names]

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        """Hand requests in, from any thread; they run whatever the trainer does."""
        self._hand_in(requests, sampling, is_submitted=True)

    def collect(self, timeout_s: float) -> list[Completion]:
        """Return what is ready of the submitted requests, waiting at most ``timeout_s`` for the first."""
        deadline = time.perf_counter() + timeout_s
        while True:
            left = deadline - time.perf_counter()
            others = self._take(0.0 if self._ready else max(0.0, min(left, WAIT_S)))
            assert not others, "what was not submitted is done when its call of generate returns"
            self._check_deadline()
            if self._ready or left <= 0:
                ready, self._ready = self._ready, []
                return ready

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stop submitted requests, from any thread; what they have is collected. What is done is left alone."""
        unwanted = set(request_ids)
        with self._lock:
            names = [
                name
                for name, asked in self._running.items()
                if asked.is_submitted and asked.request.request_id in unwanted
            ]
        self._process.abort(names)

    def _hand_in(self, requests: Sequence[Request], sampling: SamplingParams, is_submitted: bool) -> list[str]:
        rooms = [max_completion_tokens(request, self._policy, self._context, "context_length") for request in requests]
        names = [f"{next(self._numbers):016x}" for _ in requests]  # SGLang aborts all that begin with a name
        now = time.perf_counter()
        with self._lock:
            if not self._running:
                self._busy_since = now
            for name, request in zip(names, requests, strict=True):
                self._running[name] = Asked(request, sampling, is_submitted, now)
        self._process.submit(
            [
                (name, request.prompt_ids, sampling_arguments(request, sampling, self._policy, room))
                for name, request, room in zip(names, requests, rooms, strict=True)
            ]
        )
        return names

    def _take(self, timeout_s: float) -> dict[str, Completion]:
        """Take what came; return what finished of ``generate``, by name, and keep what was submitted."""
        others: dict[str, Completion] = {}
        for name, answer, problem in self._process.outputs(timeout_s):
            with self._lock:
                asked = self._running.pop(name)
            if answer is None:
                raise EngineFault(f"request {asked.request.request_id}: {problem}.")
            completion = self._completion(asked, Output.of(answer))
            if asked.is_submitted:
                self._ready.append(completion)
            else:
                others[name] = completion
        self._note_load()
        return others

    def _completion(self, asked: Asked, output: Output) -> Completion:
        self._stats.num_tokens += len(output.token_ids)
        self._stats.prompt_tokens += output.prompt_tokens
        self._stats.cached_prompt_tokens += output.cached_tokens
        self._stats.preemptions += output.retractions
        return to_completion(asked.request, asked.sampling, output, self._policy.eos_token_ids, self.version)

    def _note_load(self) -> None:
        """Count how long SGLang was at work, and how busy it was."""
        loads, self._process.loads = self._process.loads, []
        for load in loads:
            self._stats.observe(*load)
        now = time.perf_counter()
        with self._lock:
            if self._busy_since is not None:
                self._stats.seconds += now - self._busy_since
                self._busy_since = now if self._running else None

    def _check_deadline(self) -> None:
        with self._lock:
            oldest = next(iter(self._running.values()), None)
        if oldest is not None and time.perf_counter() - oldest.since > self.deadline_s:
            raise EngineFault(f"it took longer than rollout.generate_deadline_s {self.deadline_s:g}.")
