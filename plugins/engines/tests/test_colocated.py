"""Colocated engines: starts that are refused or fail, guards of streaming, and the calls of a weight sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from counting_engine import CountingRequests
from rlplug_devkit.models import ENDS, MAX_CONTEXT, PAD, make_model_folder
from rlplug_engines.colocated import EngineOptions, FirstRankEngine, MemoryAdvice, MemoryBefore, StartedEngine
from rlplug_engines.colocated import colocated as colocated_module

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import Bucket, EngineCapabilities, EngineFault, Placement, PolicySpec
from rlplug.types import GIB, NO_VERSION, Request, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets
from rlplug.weight_sync.manifest import policy_weights

ALONE = Placement(torch.device("cpu"), rank=0, world_size=1)
REQUESTS = [Request("a", (3, 4), seed=1)]


@dataclass(frozen=True)
class Options(EngineOptions):
    share_key: ClassVar[str] = "share"
    context_key: ClassVar[str] = "max_length"
    positive: ClassVar[Sequence[str]] = ("tensor_parallel_size",)
    share: float = 0.5
    max_length: int | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1


class Engine(FirstRankEngine):
    """Notes its calls; a bucket that begins with ``fails`` is a fault."""

    capabilities = EngineCapabilities(streaming=True, multi_turn=True, tensor_parallel=True)
    engine = "Counter"
    elsewhere = "count elsewhere (CounterServer)"

    def __init__(self, caches_prefixes: bool = True, problem: RunError | None = None, **options: Any) -> None:
        super().__init__(Options(**options), caches_prefixes, generate_deadline_s=60.0, longest_call_s=60.0)
        self.problem = problem
        self.memory: MemoryBefore | None = None
        self.calls: list[str] = []

    def launch(self, policy: PolicySpec, placement: Placement) -> StartedEngine:
        if self.problem is not None:
            raise self.problem
        requests = CountingRequests()
        return StartedEngine("1.0", requests.stats, requests)

    def memory_before(self, placement: Placement) -> MemoryBefore | None:
        return self.memory

    def memory_advice(self, memory: MemoryBefore, weight_bytes: int, longest: int) -> MemoryAdvice:
        return MemoryAdvice({"for weights": weight_bytes}, f"Set longest to {longest}.")

    def close(self) -> None:
        self.calls.append("close")

    def begin_sync(self) -> None:
        self.calls.append("begin")

    def load_bucket(self, bucket: Bucket, version: int) -> None:
        if self.problem is not None:
            raise self.problem
        self.calls.append("load")

    def abandon_sync(self) -> None:
        self.calls.append("abandon")

    def finish_sync(self, version: int) -> None:
        self.calls.append(f"finish {version}")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> PolicySpec:
    folder = tmp_path_factory.mktemp("model") / "llama"
    make_model_folder("llama", folder)
    return PolicySpec(str(folder), torch.float32, ENDS, PAD, MAX_CONTEXT)


@pytest.fixture
def engine(spec: PolicySpec) -> Engine:
    engine = Engine()
    engine.start(spec, ALONE)
    return engine


def buckets(spec: PolicySpec) -> Iterator[Bucket]:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(spec.path, dtype=torch.float32)
    return weight_buckets(policy, torch.float32, 1 << 14)


def test_capabilities_are_those_of_the_options() -> None:
    assert Engine().capabilities == Engine.capabilities
    assert Engine(tensor_parallel_size=2).capabilities == replace(Engine.capabilities, streaming=False)
    assert Engine(caches_prefixes=False).capabilities == replace(Engine.capabilities, multi_turn=False)
    assert Engine(tensor_parallel_size=2).ranks_per_engine == 2


def test_streaming_that_is_not_claimed_is_refused() -> None:
    engine = Engine(tensor_parallel_size=2)
    for call in (
        lambda: engine.submit(REQUESTS, SamplingParams(4)),
        lambda: engine.collect(0.1),
        lambda: engine.abort(["a"]),
    ):
        with pytest.raises(NotImplementedError, match="streaming"):
            call()


def test_ranks_that_do_not_divide_are_refused(spec: PolicySpec) -> None:
    message = r"tensor_parallel_size is 2, and the trainer has 3 ranks: .* or count elsewhere \(CounterServer\)\."
    with pytest.raises(ConfigError, match=message):
        Engine(tensor_parallel_size=2).start(spec, Placement(ALONE.device, 0, 3))


def test_a_start_says_what_there_is(spec: PolicySpec, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(colocated_module, "rank_zero_info", printed.append)
    Engine().start(spec, ALONE)
    assert printed == ["Counter 1.0: up to 8 requests at once, a KV cache of 1,000 tokens; started in 0 s"]


def test_an_engine_that_does_not_start_is_closed_and_explained(spec: PolicySpec) -> None:
    engine = Engine(problem=EngineFault("out of memory"), max_length=77)
    with pytest.raises(RunError, match=r"^Counter did not start: out of memory$") as problem:
        engine.start(spec, ALONE)
    assert not isinstance(problem.value, EngineFault)
    assert engine.calls == ["close"]


def test_an_engine_that_does_not_start_on_a_gpu_is_explained(spec: PolicySpec) -> None:
    num_bytes = sum(weight.num_bytes for weight in policy_weights(spec).values())
    engine = Engine(problem=EngineFault("out of memory"), max_length=77)
    engine.memory = MemoryBefore(total=num_bytes, free=num_bytes, trainer=0)
    gib = f"{num_bytes / GIB:.1f}"
    with pytest.raises(RunError, match=rf"out of memory\nOf the GPU's .*, {gib} for weights\. Set longest to 77\."):
        engine.start(spec, ALONE)


def test_a_refusal_at_the_start_is_left_as_it_is(spec: PolicySpec) -> None:
    engine = Engine(problem=RunError("the cache is too small"))
    with pytest.raises(RunError, match=r"^the cache is too small$"):
        engine.start(spec, ALONE)
    assert engine.calls == ["close"]


def test_requests_reach_the_engine(engine: Engine) -> None:
    (completion,) = engine.generate(REQUESTS, SamplingParams(4))
    engine.submit(REQUESTS, SamplingParams(4))
    assert engine.collect(5.0) == [completion]
    assert engine.stats()["num_tokens"] == 8
    assert engine.advice() == []


def test_a_sync_that_is_complete_gives_completions_its_version(engine: Engine, spec: PolicySpec) -> None:
    assert engine.requests.version == NO_VERSION
    report = engine.update_weights(buckets(spec), 3)
    assert report.policy_version == 3
    assert (engine.calls[0], engine.calls[-1], set(engine.calls[1:-1])) == ("begin", "finish 3", {"load"})
    assert engine.generate(REQUESTS, SamplingParams(4))[0].policy_version == 3


def test_a_sync_that_is_incomplete_or_breaks_off_is_abandoned(engine: Engine, spec: PolicySpec) -> None:
    with pytest.raises(RunError, match="left out"):
        engine.update_weights([], 3)
    assert engine.calls == ["begin", "abandon"]
    engine.problem = RunError("refused")
    with pytest.raises(RunError, match="refused"):
        engine.update_weights(buckets(spec), 3)
    assert engine.calls == ["begin", "abandon"] * 2
    assert engine.requests.version == NO_VERSION


def test_a_fault_in_a_sync_asks_the_engine_for_nothing_more(engine: Engine, spec: PolicySpec) -> None:
    engine.problem = EngineFault("it died")
    with pytest.raises(EngineFault, match="it died"):
        engine.update_weights(buckets(spec), 3)
    assert engine.calls == ["begin"]
