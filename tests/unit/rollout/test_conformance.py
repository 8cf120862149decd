"""The engine of the core passes the checks of every engine."""

from __future__ import annotations

from rlplug.rollout.hf import HFRollout
from rlplug.testing import EngineConformance


class TestHFRollout(EngineConformance):
    def make_engine(self) -> HFRollout:
        return HFRollout()
