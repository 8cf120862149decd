"""An engine that counts: requests run in a thread, and a completion is as many tokens as were asked for."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from rlplug_engines.colocated import EngineRequests, EngineStats, RunningRequest

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault, PolicySpec
from rlplug.types import Completion

SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1,), pad_token_id=0, max_context=4096)
CONTEXT = 100

HANGS, DIES, FAILS, REFUSED = range(50, 54)
"""First tokens of prompts: it is never answered; the engine dies when it is to be read; it fails; it is of no use."""


@dataclass(frozen=True)
class Answer:
    length: int
    first: int
    is_aborted: bool = False


class CountingRequests(EngineRequests[Answer]):
    """Requests in an engine that answers at once, the newest first."""

    engine: ClassVar[str] = "Counter"

    def __init__(self, deadline_s: float = 60.0) -> None:
        super().__init__(SPEC, CONTEXT, EngineStats(8, 1000), deadline_s)
        self.answers: queue.SimpleQueue[tuple[str, Answer]] = queue.SimpleQueue()
        self.names: list[str] = []
        self.seconds: float | None = None
        """What the clock says; ``None`` is the real one."""

    def start(self, requests: Sequence[RunningRequest]) -> None:
        for running in reversed(requests):
            self.names.append(running.name)
            first = running.request.prompt_ids[0]
            if first != HANGS:
                self.answers.put((running.name, Answer(running.max_tokens, first)))

    def stop(self, requests: Sequence[RunningRequest]) -> None:
        for running in requests:
            self.answers.put((running.name, Answer(1, running.request.prompt_ids[0], is_aborted=True)))

    def poll(self, timeout_s: float) -> list[tuple[str, Answer]]:
        try:
            arrived = [self.answers.get(timeout=timeout_s) if timeout_s else self.answers.get_nowait()]
        except queue.Empty:
            return []
        while not self.answers.empty():
            arrived.append(self.answers.get())
        if any(answer.first == DIES for _, answer in arrived):
            raise EngineFault("it died.")
        return arrived

    def read(self, running: RunningRequest, answer: Answer) -> Completion:
        if answer.first == FAILS:
            raise EngineFault(f"request {running.request.request_id} failed.")
        if answer.first == REFUSED:
            raise RunError(f"request {running.request.request_id} is of no use.")
        reason = "abort" if answer.is_aborted else "length"
        tokens = tuple(range(answer.length))
        return Completion(running.request.request_id, tokens, (-1.0,) * len(tokens), reason, self.version)

    def clock(self) -> float:
        return super().clock() if self.seconds is None else self.seconds
