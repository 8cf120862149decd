"""How a run takes its plan: one decision for all ranks, and a stop or a warning when it does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal
from unittest import mock

import pytest
import torch
from memory_cases import make_engine, make_facts
from rlplug_algos.grpo import GRPO
from rlplug_optims import CompileBlocks, FusedLogprobs, GradientCheckpointing
from rlplug_plan.decisions import Decisions, decide
from rlplug_plan.run_inputs import traits_of
from rlplug_plan.table import told

from rlplug.config import MemoryConfig, RunConfig
from rlplug.errors import ConfigError
from rlplug.interfaces import EngineMemoryRequest, PolicySpec
from rlplug.interfaces.memory_plan import GPU
from rlplug.models.config import ModelConfig
from rlplug.rollout.hf_engine import HFRollout
from rlplug.setup.planning import fullest_gpu, refuse_shortfall
from rlplug.types import GIB

OPTIONAL = GradientCheckpointing(only_if_needed=True)


def settle(*free_gib: float) -> Decisions:
    """Decide on ranks whose GPUs of 139.8 GiB have so much free: 1.7B and an engine that takes a tenth of an H200."""
    ranks = [(int(139.8 * GIB), int(free * GIB)) for free in free_gib]
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0), gather=lambda mine: [*mine, *ranks[1:]])
    with mock.patch("rlplug.interfaces.memory_plan.total_and_free", return_value=ranks[0]):
        gpu = fullest_gpu(strategy)  # type: ignore[arg-type]

    def inputs_with(optimizations):  # type: ignore[no-untyped-def]
        traits = traits_of("policy", optimizations)
        return make_facts(traits=traits, engine=make_engine(0.1), engine_can_sleep=True, gpu=gpu)

    return decide([OPTIONAL, CompileBlocks(), FusedLogprobs()], "auto", inputs_with)


def config_of(on_shortfall: Literal["stop", "warn"]) -> RunConfig:
    return RunConfig(ModelConfig("x"), GRPO(), torch.optim.AdamW, memory=MemoryConfig(on_shortfall=on_shortfall))


def test_the_fullest_gpu_decides() -> None:
    alone = settle(139)
    assert not alone.plan.facts.sleeps
    assert OPTIONAL not in alone.kept
    first, second = settle(139, 80), settle(80, 139)
    assert first.plan.facts.sleeps
    assert second.plan.facts.sleeps
    assert first.why == second.why


def test_what_is_needed_stays() -> None:
    decisions = settle(139, 60)
    assert decisions.plan.fits
    assert OPTIONAL in decisions.kept


def test_a_run_without_room_stops() -> None:
    with pytest.raises(ConfigError, match="does not fit into GPU memory"):
        refuse_shortfall(config_of("stop"), told(settle(139, 20)))


def test_a_run_without_room_warns_when_that_is_asked_for() -> None:
    with pytest.warns(UserWarning, match="does not fit into GPU memory"):
        refuse_shortfall(config_of("warn"), told(settle(139, 20)))


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
