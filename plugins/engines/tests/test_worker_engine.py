"""``WorkerEngine``, with the worker of docs/writing-an-engine.md; every night that page's kit runs on it too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from docs_worker import import_worker_engine
from rlplug_devkit.models import ENDS, PAD, make_model_folder
from rlplug_devkit.reference import ReferencePolicy
from rlplug_engines.workers import WorkerEngine

from rlplug.interfaces import EngineFault, Placement, PolicySpec
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Request, SamplingParams

pytestmark = pytest.mark.kit

PLACEMENT = Placement(torch.device("cpu"), rank=0, world_size=1)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("model")
    make_model_folder("llama", folder)
    return PolicySpec(str(folder), torch.float32, ENDS, PAD, max_context=64)


@pytest.fixture(scope="module")
def weights(policy: PolicySpec) -> ReferencePolicy:
    return ReferencePolicy(policy.path, torch.float32)


@pytest.fixture(scope="module")
def engine(policy: PolicySpec, weights: ReferencePolicy) -> Iterator[WorkerEngine]:
    engine: WorkerEngine = import_worker_engine().MyWorkerEngine(max_batch_size=8)
    engine.start(policy, PLACEMENT)
    engine.update_weights(weights.buckets(PLACEMENT.device, 300_000), version=3)
    yield engine
    engine.close()


def test_completions_are_those_of_the_cores_engine(
    engine: WorkerEngine, policy: PolicySpec, weights: ReferencePolicy
) -> None:
    """Would catch requests of several batches that mix, limits of single requests, and buckets that lie elsewhere."""
    core = HFRollout()
    core.start(policy, PLACEMENT)
    core.update_weights(weights.buckets(PLACEMENT.device), version=3)
    limits = [None, 5, 1]
    requests = [
        Request(f"r{i}", tuple(range(8, 9 + i % 55)), seed=i, max_new_tokens=limits[i % 3]) for i in range(0, 60, 3)
    ] + [Request(f"s{i}", (9, 8, 10), seed=i, max_new_tokens=limits[i % 3]) for i in range(9)]
    for sampling in (SamplingParams(16, temperature=0.9, top_p=0.9), SamplingParams(16, temperature=0.0)):
        ours, theirs = engine.generate(requests, sampling), core.generate(requests, sampling)
        assert [c.token_ids.tolist() for c in ours] == [c.token_ids.tolist() for c in theirs]
        assert [(c.request_id, c.finish_reason, c.policy_version) for c in ours] == [
            (c.request_id, c.finish_reason, 3) for c in theirs
        ]
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=1e-5, rtol=0)


def test_a_worker_that_died_is_a_fault_and_can_be_closed(engine: WorkerEngine) -> None:
    """Runs last: it ends the process."""
    engine.process._process.kill()
    with pytest.raises(EngineFault, match="process ended, with exit code -9"):
        engine.generate([Request("r", (9, 8), seed=0)], SamplingParams(4))
    engine.close()
    engine.close()


@pytest.mark.nightly
def test_a_worker_that_cannot_be_built_says_why(policy: PolicySpec) -> None:
    """Would catch a start that waits for its deadline. The class that it names does not exist."""
    engine = import_worker_engine().MyWorkerEngine()
    engine.worker_class = type("Missing", (), {"__module__": "no_such_module"})
    with pytest.raises(EngineFault, match="No module named 'no_such_module'"):
        engine.start(policy, PLACEMENT)
