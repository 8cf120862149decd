"""The order of ``TRTLLMRollout``'s calls, and what it does when the engine fails or hangs; over the double."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import on_double as cases
import pytest
from on_double import GREEDY, RolloutOnDouble
from ranks import run_ranks
from rlplug_rollout_trtllm import colocated
from rlplug_rollout_trtllm.engine_host import EngineHost
from rlplug_rollout_trtllm.ray_rollout import TRTLLMRayRollout
from rlplug_rollout_trtllm.surface import EXTENSION
from tensorrt_llm import AsyncLLM
from trtllm_double.contract import calls as asked

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import Bucket, EngineFault, FP8Weights, Placement

TRAINER = Path(__file__).with_name("trtllm_trainer.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models") / "llama"


@pytest.fixture
def engine(folder: Path) -> Iterator[RolloutOnDouble]:
    engine = RolloutOnDouble(max_batch_size=8)
    engine.start(cases.spec(folder), cases.CPU)
    asked.clear()
    yield engine
    engine.close()


@pytest.fixture
def ready(engine: RolloutOnDouble, folder: Path) -> RolloutOnDouble:
    engine.update_weights(cases.buckets(folder), 1)
    asked.clear()
    return engine


def calls() -> list[str]:
    """Return the names of the engine's calls, those of the same kind in a row once; of RPCs, the method."""
    named = [summary if name == "collective_rpc" else name for name, summary in asked]
    named = [
        "finalise" if (name, entry) == ("update_weights", ("update_weights", None)) else name
        for name, entry in zip(named, asked, strict=True)
    ]
    return [name for index, name in enumerate(named) if index == 0 or name != named[index - 1]]


def tags(name: str) -> list[set[str]]:
    return [set(summary) for called, summary in asked if called == name]


# ---- order ----------------------------------------------------------------------------------------------------------


def test_a_start_gives_the_engine_its_extension_and_its_place(folder: Path) -> None:
    asked.clear()
    engine = RolloutOnDouble()
    engine.start(cases.spec(folder), cases.CPU)
    name, keywords = asked[0]
    assert name == "AsyncLLM"
    assert {"placement_groups", "placement_bundle_indices", "per_worker_gpu_share", "sleep_config"} <= set(keywords)
    assert calls() == ["AsyncLLM", "setup_async"]
    assert engine._host._engine.args.extension == EXTENSION
    engine.close()


def test_a_sync_of_an_engine_that_is_awake_pauses_and_empties_the_cache(engine: RolloutOnDouble, folder: Path) -> None:
    engine.update_weights(cases.buckets(folder), 1)
    assert calls() == ["pause_generation", "update_weights", "finalise", "reset_prefix_cache", "resume_generation"]


def test_a_step_of_an_engine_that_sleeps(ready: RolloutOnDouble, folder: Path) -> None:
    ready.sleep()
    ready.wake("weights")
    ready.update_weights(cases.buckets(folder), 2)
    ready.wake("kv_cache")
    ready.generate(cases.requests(1), GREEDY)
    assert calls() == [
        "reset_prefix_cache",
        "release",
        "resume",
        "update_weights",
        "finalise",
        "resume",
        "generate_async",
    ]
    (released,), (weights, cache) = tags("release"), tags("resume")
    assert cache == {"kv_cache"}
    assert weights == released - cache
    assert "model_weights" in weights


def test_a_sync_that_breaks_off_is_not_finalised(engine: RolloutOnDouble, folder: Path) -> None:
    def broken() -> Iterator[Bucket]:
        yield next(cases.buckets(folder))
        raise ConnectionError

    with pytest.raises(ConnectionError):
        engine.update_weights(broken(), 1)
    assert calls() == ["pause_generation", "update_weights", "resume_generation"]
    engine.update_weights(cases.buckets(folder), 2)
    assert engine.generate(cases.requests(1), GREEDY)[0].policy_version == 2


def test_an_incomplete_sync_is_not_finalised(engine: RolloutOnDouble, folder: Path) -> None:
    with pytest.raises(RunError, match="left out"):
        engine.update_weights(list(cases.buckets(folder))[:0], 1)
    assert "finalise" not in calls()


# ---- start ----------------------------------------------------------------------------------------------------------


def test_an_engine_that_refuses_an_argument_is_explained(folder: Path) -> None:
    engine = RolloutOnDouble(llm_args={"model_kwargs": {"no_such_setting": 1}})
    with pytest.raises(RunError, match=r"(?s)did not start.*no_such_setting.*smoke --surface-only") as failure:
        engine.start(cases.spec(folder), cases.CPU)
    assert not isinstance(failure.value, EngineFault)
    assert engine._loop is None, "what was started has to be closed"


def test_ranks_that_do_not_fit_are_refused(folder: Path) -> None:
    engine = RolloutOnDouble(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 2, and the trainer has 3 ranks"):
        engine.start(cases.spec(folder), Placement(cases.CPU.device, rank=0, world_size=3))


def test_a_start_that_hangs_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any, **__: Any) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(EngineHost, "start", hang)
    with pytest.raises(RunError, match=r"did not answer 'start' within 0\.05 s"):
        RolloutOnDouble(start_deadline_s=0.05).start(cases.spec(folder), cases.CPU)


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_rollout_that_hangs_is_a_fault_with_what_is_done(
    ready: RolloutOnDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, generate = asyncio.Event(), EngineHost.generate

    async def hang_on_the_second(self: EngineHost, name: str, prompt: Any, sampling: Any) -> Any:
        if prompt[-1] == 11:
            await done.wait()
        return await generate(self, name, prompt, sampling)

    monkeypatch.setattr(EngineHost, "generate", hang_on_the_second)
    ready._requests.deadline_s = 0.5
    with pytest.raises(EngineFault, match=r"1 of 2 completions.*generate_deadline_s 0\.5") as fault:
        ready.generate(cases.requests(2), GREEDY)
    assert [completion.request_id for completion in fault.value.completions] == ["r0"]


def test_a_request_that_fails_is_a_fault_that_names_it(ready: RolloutOnDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: EngineHost, name: str, prompt: Any, sampling: Any) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(EngineHost, "generate", fail)
    with pytest.raises(EngineFault, match="request r0: RuntimeError: CUDA error"):
        ready.generate(cases.requests(1), GREEDY)
    ready.submit(cases.requests(1), GREEDY)
    with pytest.raises(EngineFault, match="request r0: RuntimeError: CUDA error"):
        ready.collect(5.0)


def test_a_bucket_that_hangs_is_a_fault(engine: RolloutOnDouble, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: AsyncLLM, weights: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(AsyncLLM, "update_weights", hang)
    monkeypatch.setattr(colocated, "CALL_DEADLINE_S", 0.05)
    with pytest.raises(EngineFault, match=r"did not answer 'update_weights' within 0\.05 s"):
        engine.update_weights(cases.buckets(folder), 1)


def test_weights_wait_for_no_request_that_runs(
    ready: RolloutOnDouble, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(self: EngineHost, name: str, prompt: Any, sampling: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(EngineHost, "generate", hang)
    monkeypatch.setattr("rlplug_engines.colocated.loop_requests.WAIT_S", 0.01)
    monkeypatch.setattr("rlplug_engines.colocated.loop_requests.IDLE_S", 0.05)
    ready.submit(cases.requests(1), GREEDY)
    with pytest.raises(EngineFault, match="1 requests still run"):
        ready.update_weights(cases.buckets(folder), 2)
    assert calls() == []


def test_it_starts_again_after_a_fault(ready: RolloutOnDouble, folder: Path) -> None:
    before = ready.generate(cases.requests(2), GREEDY)
    ready.close()
    ready.start(cases.spec(folder), cases.CPU)
    ready.update_weights(cases.buckets(folder), 1)
    assert ready.generate(cases.requests(2), GREEDY) == before


def test_close_ends_the_engine_and_its_ray(engine: RolloutOnDouble) -> None:
    ray: Any = engine._ray
    engine.close()
    assert calls() == ["shutdown"]
    assert ray.is_closed


# ---- what is counted and refused ------------------------------------------------------------------------------------


def test_metrics_are_those_that_are_counted(ready: RolloutOnDouble) -> None:
    completions = ready.generate(cases.requests(3), GREEDY)
    metrics = ready.stats()
    assert set(metrics) == {"num_tokens", "aborted", "tokens_per_s"}
    assert metrics["num_tokens"] == sum(len(completion.token_ids) for completion in completions)
    assert metrics["tokens_per_s"] > 0
    assert ready.advice() == []


def test_requests_that_wait_for_slots_are_advised_about(ready: RolloutOnDouble) -> None:
    """Catches requests that are not counted as they are handed over: the engine itself says nothing of them."""
    ready._stats.max_num_seqs = 2
    ready.generate(cases.requests(3), GREEDY)
    ready.stats()
    (advice,) = ready.advice()
    assert "raise rollout.max_batch_size from 2 to 3" in advice


def test_a_tensor_parallel_engine_takes_no_single_requests() -> None:
    engine = RolloutOnDouble(tensor_parallel_size=2)
    with pytest.raises(NotImplementedError, match="streaming"):
        engine.submit([], GREEDY)


def test_fp8_that_does_not_fit_is_refused_before_anything_starts(folder: Path) -> None:
    names = [name for name, _ in cases.reference(folder).model.named_parameters() if "proj" in name]
    policy = replace(cases.spec(folder), fp8=FP8Weights(tuple(names), ("lm_head.weight",)))
    for engine in (RolloutOnDouble(), TRTLLMRayRollout()):
        with pytest.raises(ConfigError, match=r"cannot take .*k_proj"):
            engine.check(policy)


# ---- two ranks, in processes of their own, that share an engine -----------------------------------------------------


def test_two_ranks_share_an_engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.reference(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    run_ranks([str(TRAINER), str(folder), str(tmp_path)], 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    start, *others = first["calls"]
    assert start == ["start", 2, [0, 1], "4,5"]  # on the GPUs of both
    assert others[:5] == [
        ["pause_generation"],
        ["update_weights", "GPU-double-0", "GPU-double-1"],  # a bucket has the handles of both
        ["update_weights", None],
        ["collective_rpc", "reset_prefix_cache"],
        ["resume_generation"],
    ]
    assert [name for name, *_ in others[5:]] == ["collective_rpc", "release", "close"]
    assert second["calls"] == []
    assert first["versions"] == second["versions"] == [5, 5, 5]
    assert first["bytes"] == second["bytes"]
