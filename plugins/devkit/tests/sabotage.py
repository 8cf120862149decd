"""What classes of checks on sabotaged engines share."""

from __future__ import annotations

from typing import ClassVar

from rlplug_devkit.engines.base import EngineChecks

from rlplug.rollout.hf_engine import HFRollout


class Sabotaged(EngineChecks):
    num_draws = 400
    max_context = 1024
    engine: ClassVar[type[HFRollout]]

    def make_engine(self) -> HFRollout:
        return self.engine()

    def device_bytes_in_use(self, engine):
        return engine.bytes_in_use()


def mixed(*mistakes: type[HFRollout]) -> type[HFRollout]:
    """Return an engine with all of these mistakes; they have to do with different checks."""
    return type("And".join(mistake.__name__ for mistake in mistakes), mistakes, {})
