"""``TRTLLMRayRollout`` beyond the kit: tensor parallelism, turns among engines, and failures; over double and stand-in.

Weights cross a real gloo group, in threads of one process. Ray, NCCL and TensorRT-LLM were not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import on_double  # noqa: F401 - it makes the double importable
import pytest
import trtllm_cases as cases
from ray_stand_in import Cluster
from rlplug_rollout_trtllm.engine_host import EngineHost
from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout

from rlplug.errors import RunError
from rlplug.interfaces import Bucket, EngineFault
from rlplug.types import SamplingParams

GREEDY = SamplingParams(4, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "llama"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(gpus=4)
    cluster.install(monkeypatch)
    return cluster


@pytest.fixture
def started(cluster: Cluster, folder: Path) -> Iterator[TRTLLMRayRollout]:
    engine = TRTLLMRayRollout(num_engines=2, tensor_parallel_size=2)
    engine.start(cases.spec(folder), cases.CPU)
    yield engine
    engine.close()


def test_every_worker_of_every_engine_gets_the_weights(started: TRTLLMRayRollout, folder: Path) -> None:
    report = started.update_weights(cases.buckets(folder), 3)
    assert report.policy_version == 3
    assert report.num_bytes == cases.reference(folder).num_bytes()
    first, second = (started.generate(cases.requests(1), GREEDY) for _ in range(2))  # one from each engine
    assert first == second


def test_requests_go_to_the_engines_in_turn(
    started: TRTLLMRayRollout, cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    generate = EngineHost.generate

    async def spied(self: EngineHost, name: str, prompt: Any, sampling: Any) -> Any:
        asked.append(id(self))
        return await generate(self, name, prompt, sampling)

    monkeypatch.setattr(EngineHost, "generate", spied)
    started.update_weights(cases.buckets(folder), 1)
    started.generate(cases.requests(6), GREEDY)
    assert sorted(asked.count(engine) for engine in set(asked)) == [3, 3]


def test_each_engine_has_gpus_of_its_own_and_gives_them_back(started: TRTLLMRayRollout, cluster: Cluster) -> None:
    assert cluster.free == 0
    assert cluster.strategies == ["STRICT_PACK", "STRICT_PACK"]
    started.close()
    assert cluster.free == 4
    assert not cluster.actors
    assert not cluster.is_initialized


def test_engines_may_span_hosts(cluster: Cluster, folder: Path) -> None:
    engine = TRTLLMRayRollout(tensor_parallel_size=4, spans_hosts=True)
    engine.start(cases.spec(folder), cases.CPU)
    engine.close()
    assert cluster.strategies == ["PACK"]


def test_too_few_gpus_leave_nothing_behind(cluster: Cluster, folder: Path) -> None:
    engine = TRTLLMRayRollout(num_engines=5)
    with pytest.raises(RunError, match="Ray had no 1 free GPUs on one host"):
        engine.start(cases.spec(folder), cases.CPU)
    assert cluster.free == 4
    assert not cluster.actors


def test_an_engine_that_does_not_start_is_explained(cluster: Cluster, folder: Path) -> None:
    engine = TRTLLMRayRollout(llm_args={"model_kwargs": {"no_such_setting": 1}})
    with pytest.raises(RunError, match=r"did not start.*no_such_setting") as failure:
        engine.start(cases.spec(folder), cases.CPU)
    assert not isinstance(failure.value, EngineFault)
    assert cluster.free == 4


def test_an_engine_that_fails_in_a_sync_is_a_fault(
    started: TRTLLMRayRollout, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: EngineHost) -> None:
        raise RuntimeError("actor died")

    consumed: list[int] = []

    def watched() -> Iterator[Bucket]:
        for number, bucket in enumerate(cases.buckets(folder)):
            consumed.append(number)
            yield bucket

    monkeypatch.setattr(EngineHost, "pause", fail)
    with pytest.raises(EngineFault, match="actor died"):
        started.update_weights(watched(), 1)
    assert len(consumed) == len(list(cases.buckets(folder))), "other ranks would wait for ever"


def test_a_cluster_that_the_trainer_is_part_of_stays(cluster: Cluster, folder: Path) -> None:
    cluster.is_initialized = True
    engine = TRTLLMRayRollout()
    engine.start(cases.spec(folder), cases.CPU)
    engine.close()
    assert cluster.is_initialized
