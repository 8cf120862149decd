"""The engine of the core passes the checks of every engine."""

from __future__ import annotations

from rlplug_devkit import FLOAT32, EngineConformance

from rlplug.rollout.hf_engine import HFRollout


class TestHFRollout(EngineConformance):
    fp8_tolerances = FLOAT32  # it rounds weights alone

    def make_engine(self) -> HFRollout:
        return HFRollout()
