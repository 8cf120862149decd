"""An environment that says once what the policy said."""

from __future__ import annotations

from rlplug.interfaces import Environment, StepResult


class Echo(Environment):
    """Repeats the first turn; the second is the last."""

    has_spoken = False

    def step(self, completion: str) -> StepResult:
        result = StepResult(completion, done=self.has_spoken)
        self.has_spoken = True
        return result
