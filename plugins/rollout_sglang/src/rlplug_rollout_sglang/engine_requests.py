"""Requests in SGLang's process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from rlplug_engines.colocated import EngineProcess, EngineRequests, EngineStats, RunningRequest

from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.types import Completion
from rlplug_rollout_sglang.sampling import Output, sampling_arguments, to_completion

Answer: TypeAlias = tuple[dict[str, Any] | None, str | None]
"""What SGLang generated, or why it did not."""


class SGLangRequests(EngineRequests[Answer]):
    """Hands requests to SGLang's process, where they run whatever the trainer does.

    SGLang aborts all requests whose names begin with the one that is given, so names must be of equal length.
    """

    engine: ClassVar[str] = "SGLang"

    def __init__(
        self, process: EngineProcess, policy: PolicySpec, context: int, stats: EngineStats, deadline_s: float
    ) -> None:
        super().__init__(policy, context, stats, deadline_s)
        self._process = process

    def start(self, requests: Sequence[RunningRequest]) -> None:
        samplings = [sampling_arguments(r.request, r.sampling, self.policy, r.max_tokens) for r in requests]
        self._process.submit([(r.name, r.request.prompt_ids, s) for r, s in zip(requests, samplings, strict=True)])

    def stop(self, requests: Sequence[RunningRequest]) -> None:
        self._process.abort([running.name for running in requests])

    def poll(self, timeout_s: float) -> list[tuple[str, Answer]]:
        outputs = self._process.outputs(timeout_s)
        loads, self._process.loads = self._process.loads, []
        for load in loads:
            self.stats.observe(*load)
        return [(name, (answer, problem)) for name, answer, problem in outputs]

    def read(self, running: RunningRequest, answer: Answer) -> Completion:
        generated, problem = answer
        if generated is None:
            raise EngineFault(f"request {running.request.request_id}: {problem}.")
        output = Output.of(generated)
        self.stats.prompt_tokens += output.prompt_tokens
        self.stats.cached_prompt_tokens += output.cached_tokens
        self.stats.preemptions += output.retractions
        return to_completion(running.request, running.sampling, output, self.policy.eos_token_ids, self.version)
