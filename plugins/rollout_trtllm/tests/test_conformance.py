"""Both engines pass the checks of every engine, over a strict double on the CPU, a stand-in for Ray, and gloo.

That says that the plugin keeps the contract of the double, and nothing of TensorRT-LLM and Ray, which were not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from on_double import RolloutOnDouble
from ray_stand_in import Cluster
from rlplug_devkit import EngineConformance
from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout

from rlplug.interfaces import RolloutEngine

pytestmark = pytest.mark.kit
CHANGES = frozenset({"environment variables"})
"""TensorRT-LLM and Ray read theirs from the environment of the process that starts them."""


class TestTRTLLMRollout(EngineConformance):
    changes_of_process = CHANGES

    def make_engine(self) -> RolloutOnDouble:
        return RolloutOnDouble(max_batch_size=64)

    def device_bytes_in_use(self, engine: RolloutEngine) -> None:
        """Nothing to measure: the double is told to sleep, and keeps its weights in this process."""
        return


class TestTRTLLMRayRollout(EngineConformance):
    changes_of_process = CHANGES

    @pytest.fixture(autouse=True, scope="class")
    def cluster(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            Cluster(gpus=8).install(patch)
            yield
            type(self).teardown_class()  # before Ray goes

    def make_engine(self) -> TRTLLMRayRollout:
        return TRTLLMRayRollout(num_engines=2, max_batch_size=64)
