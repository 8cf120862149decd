"""``TRTLLMRayRollout`` beyond the kit, and where Ray puts workers; over the double and a stand-in that counts GPUs.

Weights cross a real gloo group, in threads of one process. Ray, NCCL and TensorRT-LLM were not run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import on_double as cases
import pytest
from on_double import GREEDY
from ray_stand_in import Cluster
from rlplug_rollout_trtllm.engine_host import EngineHost
from rlplug_rollout_trtllm.placement import Bundles, PrivateRay, attach
from rlplug_rollout_trtllm.ray_rollout import RayEngine, TRTLLMRayRollout
from tensorrt_llm import AsyncLLM

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import Bucket, EngineFault


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
    async def fail(self: AsyncLLM) -> None:
        raise RuntimeError("actor died")

    consumed: list[int] = []

    def watched() -> Iterator[Bucket]:
        for number, bucket in enumerate(cases.buckets(folder)):
            consumed.append(number)
            yield bucket

    monkeypatch.setattr(AsyncLLM, "pause_generation", fail)
    with pytest.raises(EngineFault, match="actor died"):
        started.update_weights(watched(), 1)
    assert len(consumed) == len(list(cases.buckets(folder))), "other ranks would wait for ever"


def test_a_cluster_that_the_trainer_is_part_of_stays(cluster: Cluster, folder: Path) -> None:
    cluster.is_initialized = True
    engine = TRTLLMRayRollout()
    engine.start(cases.spec(folder), cases.CPU)
    engine.close()
    assert cluster.is_initialized


# ---- placement ------------------------------------------------------------------------------------------------------


def test_a_private_ray_has_the_engines_gpus_and_no_others(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    init = cluster._init
    import ray

    def spied(address: str, **arguments: object) -> None:
        seen.extend([os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("SLURM_JOB_ID", "unset")])
        init(address, **arguments)

    monkeypatch.setattr(ray, "init", spied)
    private = PrivateRay("2,3", 2, deadline_s=1.0)
    assert seen == ["2,3", "unset"]
    assert (cluster.inits[0]["address"], cluster.inits[0]["num_gpus"]) == ("local", 2)
    assert private.bundles.indices == [0, 1]
    assert cluster.strategies == ["STRICT_PACK"]
    private.close()
    private.close()
    assert not cluster.is_initialized


def test_a_trainer_within_ray_is_refused(cluster: Cluster) -> None:
    cluster.is_initialized = True
    with pytest.raises(ConfigError, match="belongs to a Ray cluster already"):
        PrivateRay("0", 1, deadline_s=1.0)
    assert cluster.is_initialized  # it is not ours to end


def test_a_ray_that_does_not_start_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RunError, match="Ray did not start on GPUs 0: OSError: no space"):
        PrivateRay("0", 1, deadline_s=1.0)


def test_a_cluster_is_joined_once(cluster: Cluster) -> None:
    assert attach("auto")[1] is True
    assert attach("auto")[1] is False
    assert len(cluster.inits) == 1


def test_a_missing_cluster_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(gpus=4, is_reachable=False).install(monkeypatch)
    with pytest.raises(ConfigError, match=r"rollout\.ray_address is '10.0.0.1:6379'.*ray start --head"):
        attach("10.0.0.1:6379")


def test_too_few_gpus_are_reported_with_what_there_is(cluster: Cluster) -> None:
    ray, _ = attach("auto")
    Bundles.reserve(ray, 3, True, 1.0)
    with pytest.raises(RunError, match=r"no 2 free GPUs on one host .*it has 4, of which 1 are free"):
        Bundles.reserve(ray, 2, False, 1.0)


def test_gpus_are_given_back(cluster: Cluster) -> None:
    ray, _ = attach("auto")
    Bundles.reserve(ray, 3, True, 1.0).remove()
    assert cluster.free == 4


def test_an_engines_actor_is_on_the_host_of_its_first_worker_and_takes_no_gpu(cluster: Cluster) -> None:
    ray, _ = attach("auto")
    bundles = Bundles.reserve(ray, 2, True, 1.0)
    RayEngine.make(ray, "an-engine", bundles)
    (options,) = cluster.options
    assert options["num_gpus"] == 0
    assert options["scheduling_strategy"].node == bundles.first_node() == "node-of-1"
    assert options["runtime_env"]["env_vars"]["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
