"""Both engines pass the checks of every engine, over a strict double on the CPU, a stand-in for Ray, and gloo.

That says that the plugin keeps the contract of the double, and nothing of TensorRT-LLM and Ray, which were not run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from on_double import RolloutOnDouble
from ray_stand_in import Cluster
from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout

from rlplug.testing import EngineConformance


class TestTRTLLMRollout(EngineConformance):
    def make_engine(self) -> RolloutOnDouble:
        return RolloutOnDouble(max_batch_size=64)


class TestTRTLLMRayRollout(EngineConformance):
    @pytest.fixture(autouse=True, scope="class")
    def cluster(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            Cluster(gpus=8).install(patch)
            yield
            type(self).teardown_class()  # before Ray goes

    def make_engine(self) -> TRTLLMRayRollout:
        return TRTLLMRayRollout(num_engines=2, max_batch_size=64)
