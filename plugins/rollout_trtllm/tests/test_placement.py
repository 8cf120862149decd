"""Where Ray puts workers, over a stand-in that counts GPUs; Ray itself was not run."""

from __future__ import annotations

import os

import pytest
from ray_stand_in import Cluster
from rlplug_rollout_trtllm.placement import PrivateRay, attach, first_node, make_bundles, remove_bundles
from rlplug_rollout_trtllm.ray_engines import make_actor

from rlplug.errors import ConfigError, RunError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(gpus=4)
    cluster.install(monkeypatch)
    return cluster


def test_a_private_ray_has_the_engines_gpus_and_no_others(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    init = cluster._init
    import ray

    def spied(**arguments: object) -> None:
        seen.extend([os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("SLURM_JOB_ID", "unset")])
        init(**arguments)

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

    def fail(**_: object) -> None:
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
    make_bundles(ray, 3, "PACK", 1.0)
    with pytest.raises(RunError, match=r"no 2 free GPUs on one host .*it has 4, of which 1 are free"):
        make_bundles(ray, 2, "STRICT_PACK", 1.0)


def test_gpus_are_given_back(cluster: Cluster) -> None:
    ray, _ = attach("auto")
    remove_bundles(make_bundles(ray, 3, "PACK", 1.0))
    assert cluster.free == 4


def test_an_engines_actor_is_on_the_host_of_its_first_worker_and_takes_no_gpu(cluster: Cluster) -> None:
    ray, _ = attach("auto")
    bundles = make_bundles(ray, 2, "PACK", 1.0)
    make_actor(ray, "an-engine", bundles)
    (options,) = cluster.options
    assert options["num_gpus"] == 0
    assert options["scheduling_strategy"].node == first_node(bundles) == "node-of-1"
    assert options["runtime_env"]["env_vars"]["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
