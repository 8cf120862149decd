"""What the plan decides: an engine's sleep, optional optimizations; and what a run without room is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from memory_cases import EAGER, FUSED, LLAMA, make_engine, make_facts, on
from rlplug_optims import ActivationOffload, CompileBlocks, FusedLogprobs, GradientCheckpointing
from rlplug_plan.decisions import decide, shortfall
from rlplug_plan.inputs import MemoryInputs, ModelInputs
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.remedies import find_remedies
from rlplug_plan.run_inputs import optimizer_state_bytes, traits_of
from rlplug_plan.table import memory_notes, memory_rows

from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Optimization
from rlplug.interfaces.memory_plan import GPU
from rlplug.types import GIB


def run_with(gib: float = 139.8, **others: object):  # type: ignore[no-untyped-def]
    """Return what ``decide`` asks for: the run on GPUs of ``gib``, by its optimizations."""

    def facts_with(optimizations: Sequence[Optimization]) -> MemoryInputs:
        total = int(gib * GIB)
        facts = make_facts(**({"traits": traits_of("policy", optimizations), "engine_can_sleep": True} | others))
        return replace(facts, gpu=GPU(total, total, is_here=False))

    return facts_with


FAST = [CompileBlocks(), FusedLogprobs()]


def test_an_engine_that_fits_beside_the_update_stays_awake() -> None:
    decisions = decide(FAST, "auto", run_with(engine=make_engine(0.3)))
    assert not decisions.plan.facts.sleeps
    assert decisions.why == "engine stays awake: update 57.3 + engine 41.9 + 0.6 of 139.8 GiB"


def test_an_engine_that_does_not_fit_beside_the_update_sleeps() -> None:
    decisions = decide(FAST, "auto", run_with(engine=make_engine(0.6)))
    assert decisions.plan.facts.sleeps
    assert decisions.plan.fits
    assert decisions.why.startswith("engine sleeps between rollouts: update 57.3 + engine 83.9 + 0.6 of 139.8 GiB")


def test_a_rollout_that_does_not_fit_is_no_reason_to_sleep() -> None:
    decisions = decide(FAST, "auto", run_with(engine=make_engine(0.85, keeps_cache=False)))
    assert not decisions.plan.fits
    assert not decisions.plan.facts.sleeps


@pytest.mark.parametrize("setting", [True, False])
def test_a_setting_is_kept(setting: bool) -> None:
    for share in (0.3, 0.6):
        assert decide(FAST, setting, run_with(engine=make_engine(share))).plan.facts.sleeps is setting


def test_an_engine_that_cannot_sleep_stays_awake() -> None:
    decisions = decide(FAST, "auto", run_with(engine=make_engine(0.6), engine_can_sleep=False))
    assert not decisions.plan.facts.sleeps
    assert not decisions.why
    assert not decide(FAST, "auto", run_with()).plan.facts.sleeps


def test_an_optimization_of_the_critic_alone_saves_nothing_of_the_policy_s() -> None:
    """Catches an option that edits one model, and a plan that counts it for both."""
    chosen = [GradientCheckpointing(networks=["critic"]), ActivationOffload(networks=["policy"])]
    policy, critic = (traits_of(name, chosen) for name in ("policy", "critic"))
    assert (policy.recompute, policy.activations_on_host) == ("nothing", True)
    assert (critic.recompute, critic.activations_on_host) == ("all", False)
    facts = make_facts(traits=EAGER, critic=ModelInputs(LLAMA, replace(EAGER, recompute="all"), 8.0))
    others = [setting.name for each in find_remedies(on(80, facts)) for setting in each.settings]
    assert "selective" not in others  # of all models, beside checkpointing of one


def test_an_optional_optimization_that_is_not_needed_is_left_out() -> None:
    optional = GradientCheckpointing(only_if_needed=True)
    decisions = decide([optional, *FAST], "auto", run_with())
    assert decisions.kept == tuple(FAST)
    (effect,) = decisions.left_out
    assert effect.description == "GradientCheckpointing left out: the plan fits without it, 58 of 140 GiB"


def test_an_optional_optimization_that_is_needed_is_kept() -> None:
    optional = GradientCheckpointing(only_if_needed=True)
    decisions = decide([optional, *FAST], "auto", run_with(50))
    assert decisions.kept == (optional, *FAST)
    assert decisions.plan.fits
    assert not decisions.left_out


def test_optional_optimizations_are_added_in_order() -> None:
    first, second = GradientCheckpointing(only_if_needed=True), ActivationOffload(only_if_needed=True)
    decisions = decide([first, second, *FAST], "auto", run_with(50))
    assert decisions.kept == (first, *FAST)
    assert [effect.description.split()[0] for effect in decisions.left_out] == ["ActivationOffload"]
    assert decide([first, second, *FAST], "auto", run_with(10)).kept == (first, second, *FAST)


def test_the_engine_sleeps_before_blocks_are_recomputed() -> None:
    optional = GradientCheckpointing(only_if_needed=True)
    decisions = decide([optional, *FAST], "auto", run_with(engine=make_engine(0.6)))
    assert decisions.plan.facts.sleeps
    assert decisions.kept == tuple(FAST)


def test_traits_are_of_the_networks_that_an_optimization_changes() -> None:
    chosen = [GradientCheckpointing(every_n_blocks=2), *FAST]
    assert traits_of("policy", chosen) == replace(FUSED, recompute="all", recompute_every=2)
    assert traits_of("reference", chosen) == FUSED
    assert traits_of("critic", chosen) == ActivationTraits(fused_pointwise=True, recompute="all", recompute_every=2)


def test_a_shortfall_names_phase_numbers_items_and_remedy() -> None:
    assert shortfall(MemoryPlan(run_with()(FAST))) is None
    problem = shortfall(MemoryPlan(run_with(50)(FAST)))
    assert isinstance(problem, ConfigError)
    for part in ("phase update needs 57.9 GiB", "45.0 of 50.0", "activations 30.0", "max_tokens_per_gpu: 9216"):
        assert part in str(problem)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda named: torch.optim.AdamW(named, fused=True), 8),
        (lambda named: torch.optim.SGD(named), 0),
        (lambda named: torch.optim.SGD(named, momentum=0.9), 4),
    ],
)
def test_state_is_what_a_step_leaves(make, expected) -> None:  # type: ignore[no-untyped-def]
    assert optimizer_state_bytes(make) == expected


def test_state_of_an_optimizer_that_cannot_step_here_is_assumed_and_said() -> None:
    def needs_a_gpu(named):  # type: ignore[no-untyped-def]
        raise RuntimeError("CUDA only")

    assert optimizer_state_bytes(needs_a_gpu) is None
    notes = memory_notes(decide([], "auto", lambda _: make_facts(assumes_state=True)))
    assert any("assumed" in note for note in notes)


def test_rows_say_what_is_asleep_or_offloaded() -> None:
    reference = ModelInputs(LLAMA, EAGER)
    facts = make_facts(engine=make_engine(0.4), sleeps=True, offload="optimizer_and_weights", reference=reference)
    rows = {name: cells for name, *cells in memory_rows(MemoryPlan(facts))}
    assert rows["engine KV cache"] == ["asleep", "51.7", "asleep", "asleep"]
    assert rows["weights, float32"] == ["6.4", "offloaded", "6.4", "6.4"]
    assert rows["reference, float32"] == ["offloaded", "offloaded", "6.4", "offloaded"]
    assert "critic, float32" not in rows
    assert float(rows["needed"][3]) == pytest.approx(MemoryPlan(facts).need("update") / GIB, abs=0.05)
