"""How a run takes its plan: one decision for all ranks, and a stop or a warning when it does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal
from unittest import mock

import pytest
import torch
from rlplug_algos.grpo import GRPO
from rlplug_optims import CompileBlocks, FusedLogprobs, GradientCheckpointing
from unit.training.memory_plan.memory_cases import make_engine, make_facts

from rlplug.config import MemoryConfig, RunConfig
from rlplug.errors import ConfigError
from rlplug.interfaces import EngineMemoryRequest, PolicySpec
from rlplug.memory_inputs import traits_of
from rlplug.models.config import ModelConfig
from rlplug.rollout.hf_engine import HFRollout
from rlplug.setup import fullest_gpu, make_optimizers, refuse_shortfall, take_optimizer_options
from rlplug.training.memory_plan.decisions import Decisions, decide
from rlplug.training.memory_plan.inputs import GPU
from rlplug.types import GIB

OPTIONAL = GradientCheckpointing(only_if_needed=True)


def settle(*free_gib: float) -> Decisions:
    """Decide on ranks whose GPUs of 139.8 GiB have so much free: 1.7B and an engine that takes a tenth of an H200."""
    ranks = [(int(139.8 * GIB), int(free * GIB)) for free in free_gib]
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0), gather=lambda mine: [*mine, *ranks[1:]])
    with mock.patch("rlplug.setup.total_and_free", return_value=ranks[0]):
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
        refuse_shortfall(config_of("stop"), settle(139, 20))


def test_a_run_without_room_warns_when_that_is_asked_for() -> None:
    with pytest.warns(UserWarning, match="does not fit into GPU memory"):
        refuse_shortfall(config_of("warn"), settle(139, 20))


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


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **({"lr": 0.1, "weight_decay": 0.0} | options))


SCHEDULES = {
    "none": None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.01),
    "longer": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=0.02),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
        ],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("new", SCHEDULES)
@pytest.mark.parametrize("old", ["none", "cosine", "warm-up"])
@pytest.mark.parametrize("critic", [False, True])
def test_a_resumed_optimizer_takes_new_options_as_if_it_had_always_had_them(old, new, critic):
    """It catches an option that the restored state overrides, such as the learning rate."""
    policy = torch.nn.Linear(2, 2)
    models = SimpleNamespace(policy=policy, critic=torch.nn.Linear(1, 1) if critic else None)

    def config(schedule, **options):
        of_critic = SimpleNamespace(make_optimizer=adamw, lr_scheduler=SCHEDULES["cosine"])
        return SimpleNamespace(
            optimizer=lambda parameters: adamw(parameters, **options),
            lr_scheduler=SCHEDULES[schedule],
            critic=of_critic if critic else None,
        )

    def take_step(optimizer, scheduler):
        policy(torch.ones(2)).sum().backward()
        used = {name: value for name, value in optimizer.param_groups[0].items() if not name.startswith("param")}
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return used

    optimizers, schedulers = make_optimizers(config(old), models)
    for _ in range(6):
        take_step(optimizers[0], schedulers[0])
    moments = {name: value.clone() for name, value in optimizers[0].state[policy.weight].items()}
    saved = optimizers[0].state_dict()
    changed = config(new, lr=0.02, betas=(0.5, 0.6), weight_decay=0.3)
    optimizers, schedulers = make_optimizers(changed, models)
    optimizers[0].load_state_dict(saved)

    take_optimizer_options(changed, models, optimizers, schedulers, [6, 8][: len(optimizers)])

    assert all(torch.equal(optimizers[0].state[policy.weight][name], moments[name]) for name in moments)
    always = make_optimizers(changed, models)
    expected = [take_step(always[0][0], always[1][0]) for _ in range(10)]
    assert [take_step(optimizers[0], schedulers[0]) for _ in range(4)] == expected[6:]
    if critic:
        assert schedulers[1].last_epoch == 8
