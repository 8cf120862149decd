"""How a run takes its plan: one decision for all ranks, and a stop or a warning when it does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlplug_optims import CompileBlocks, FusedLogprobs, GradientCheckpointing
from unit.training.memory_plan.memory_cases import make_engine, make_facts

from rlplug import setup as module_setup
from rlplug.errors import ConfigError
from rlplug.interfaces import EngineMemoryRequest, PolicySpec
from rlplug.memory_inputs import traits_of
from rlplug.rollout.hf_engine import HFRollout
from rlplug.setup import RLModuleSetup
from rlplug.training.memory_plan.decisions import decide
from rlplug.training.memory_plan.inputs import GPU
from rlplug.types import GIB

OPTIONAL = GradientCheckpointing(only_if_needed=True)


class Run:
    """Stands for what a module has configured: 1.7B and an engine that takes a tenth of an H200."""

    def decide(self, gpu: GPU) -> Any:
        def facts_with(optimizations):  # type: ignore[no-untyped-def]
            engine = make_engine(0.1)
            traits = traits_of("policy", optimizations)
            return make_facts(traits=traits, engine=engine, engine_can_sleep=True, gpu=gpu)

        return decide([OPTIONAL, CompileBlocks(), FusedLogprobs()], "auto", facts_with)


def settle(monkeypatch: pytest.MonkeyPatch, *free_gib: float, on_shortfall: str = "stop") -> Any:
    """Settle on ranks whose GPUs of 139.8 GiB have so much free; this is the first."""
    ranks = [(int(139.8 * GIB), int(free * GIB)) for free in free_gib]
    monkeypatch.setattr(module_setup, "total_and_free", lambda device: ranks[0])
    monkeypatch.setattr(module_setup, "PlannedRun", lambda *_: Run())
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0), gather=lambda mine: [*mine, *ranks[1:]])
    module: Any = SimpleNamespace(strategy=strategy, on_memory_shortfall=on_shortfall, _longest=768)
    RLModuleSetup._settle_memory(module, mesh=None)  # type: ignore[arg-type]
    return module


def test_the_fullest_gpu_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = settle(monkeypatch, 139)
    assert not alone.sleeps
    assert OPTIONAL not in alone.optimizations
    first, second = settle(monkeypatch, 139, 80), settle(monkeypatch, 80, 139)
    assert first.sleeps
    assert second.sleeps
    assert first.memory.why == second.memory.why


def test_what_is_needed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = settle(monkeypatch, 139, 60)
    assert module.memory.plan.fits
    assert OPTIONAL in module.optimizations


def test_a_run_without_room_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not fit into GPU memory"):
        settle(monkeypatch, 139, 20)


def test_a_run_without_room_warns_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="does not fit into GPU memory"):
        module = settle(monkeypatch, 139, 20, on_shortfall="warn")
    assert not module.memory.plan.fits


def test_reserve_and_context_are_left_out_of_the_capacity() -> None:
    assert GPU(100 * GIB, 80 * GIB).capacity == int(80.6 * GIB) - 10 * GIB
    assert GPU(100 * GIB, 100 * GIB, is_here=False).capacity == 90 * GIB


def test_transformers_keeps_its_copy_and_frees_its_cache() -> None:
    spec = PolicySpec("model", torch.bfloat16, (2,), 2, max_context=8192)
    needs = EngineMemoryRequest(80 * GIB, 1_000_000, 1000, completions=64, longest=100, vocab_size=10)
    memory = HFRollout(max_batch_size=16).plan_memory(spec, needs)
    assert memory.weights == memory.idle == memory.asleep == 2_000_000
    assert memory.kv_cache == 16 * 100 * 1000
    assert not memory.can_sleep
    assert HFRollout(max_batch_size=256).plan_memory(spec, needs).kv_cache == 64 * 100 * 1000
