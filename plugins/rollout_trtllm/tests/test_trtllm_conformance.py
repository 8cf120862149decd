"""TensorRT-LLM beside the trainer passes the checks of every engine, over a strict double on the CPU.

That says that the plugin keeps the contract of the double, and nothing of TensorRT-LLM itself, which was not run.
"""

from __future__ import annotations

from on_double import RolloutOnDouble

from rlplug.testing import EngineConformance


class TestTRTLLMRollout(EngineConformance):
    def make_engine(self) -> RolloutOnDouble:
        return RolloutOnDouble(max_batch_size=64)
