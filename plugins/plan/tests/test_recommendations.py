"""What is recommended fits together, and is as much as fits."""

from __future__ import annotations

from dataclasses import replace

from memory_cases import AWAKE_SIZES, EAGER, FUSED, LLAMA, make_engine, make_facts, on
from rlplug_plan.inputs import MemoryInputs, ModelInputs
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.recommendations import recommendations
from rlplug_plan.resize import (
    with_budget,
    with_engine_gpus,
    with_forward_budget,
    with_forward_rows,
    with_rows,
    with_share,
)

from rlplug.types import MeshSizes

AWAKE = make_facts(**AWAKE_SIZES)
ASLEEP = replace(AWAKE, sleeps=True)
BUDGET = "max_tokens_per_gpu"


def recommended(facts: MemoryInputs, key: str) -> str:
    (line,) = [each.text for each in recommendations(facts) if each.key.endswith(key)]
    return line


def test_the_share_holds_all_completions_and_says_how_full_the_cache_is() -> None:
    facts = make_facts(engine=make_engine(0.4), completions=128)
    line = recommended(facts, "gpu_memory_utilization")
    # 128 x 768 x 196,608 bytes = 18.0 GiB, weights 3.2, passes 1.0: 22.2 of 139.8
    assert ": 0.16; its KV cache of 18.2 GiB holds all 128 completions" in line
    assert "which use 99%" in line


def test_a_share_that_cannot_hold_them_is_the_largest_that_fits() -> None:
    facts = make_facts(engine=make_engine(0.4), completions=1024)
    line = recommended(facts, "gpu_memory_utilization")
    assert "the most that fits" in line
    share = float(line.split(": ")[1].split(",")[0])
    assert MemoryPlan(with_share(facts, share)).fits
    assert not MemoryPlan(with_share(facts, share + 0.01)).fits


def test_the_budget_is_the_largest_that_fits() -> None:
    budget = int(recommended(on(80, make_facts()), BUDGET).rpartition(" ")[2])
    assert MemoryPlan(with_budget(on(80, make_facts()), budget)).fits
    assert not MemoryPlan(with_budget(on(80, make_facts()), budget + 2048)).fits


def test_offload_is_recommended_as_far_as_it_is_needed() -> None:
    assert recommended(replace(AWAKE, offload="optimizer", completions=64), "offload").endswith("none is enough")
    assert recommended(on(65, ASLEEP), "offload").endswith("optimizer_and_weights, for what is above")


def with_all(facts: MemoryInputs) -> MemoryInputs:
    """Return the run with all that is recommended for it, set key by key."""
    for each in recommendations(facts):
        key = each.key.rpartition(".")[2]
        if key == "sleep_between_rollouts":
            facts = replace(facts, sleeps=each.value)
        elif key == "offload":
            facts = replace(facts, offload=each.value)
        else:
            change = {
                "tensor_parallel_size": with_engine_gpus,
                "gpu_memory_utilization": with_share,
                "max_tokens_per_gpu": with_budget,
                "max_tokens_per_gpu_forward": with_forward_budget,
                "micro_batch_size_per_gpu": with_rows,
                "micro_batch_size_per_gpu_forward": with_forward_rows,
            }[key]
            facts = change(facts, each.value)
    return facts


def test_all_values_fit_together_and_an_engine_sleeps_for_larger_ones() -> None:
    """Catches values each chosen beside the run's others: awake, neither a larger pass nor all completions fit."""
    facts = on(100, AWAKE)
    facts = with_share(with_budget(facts, 1024), 0.5)
    assert MemoryPlan(facts).fits
    tuned = with_all(facts)
    assert MemoryPlan(tuned).fits
    assert tuned.sleeps
    assert tuned.sizes.max_tokens["update"] > 16384
    assert not MemoryPlan(with_budget(tuned, tuned.sizes.max_tokens["update"] + 1024)).fits
    assert "awake, a cache for" in recommended(facts, "sleep_between_rollouts")


def test_rows_a_pass_are_recommended_like_tokens() -> None:
    sizes = replace(make_facts().sizes, max_tokens={}, micro_batch_size=2)
    facts = on(60, replace(make_facts(), sizes=sizes))
    number = int(recommended(facts, "micro_batch_size_per_gpu").split()[-1])
    assert number > 2
    assert MemoryPlan(with_rows(facts, number)).fits
    assert not MemoryPlan(with_rows(facts, 128 // -(-128 // (number + 1)) + 1)).fits


def test_more_rows_a_forward_only_pass_are_recommended_where_they_fit() -> None:
    """Catches rows of updates alone, and forward-only passes that are planned with them."""
    sizes = replace(make_facts().sizes, max_tokens={}, micro_batch_size=2)
    facts = on(60, replace(make_facts(reference=ModelInputs(LLAMA, FUSED)), sizes=sizes))
    found = {each.key.rpartition(".")[2]: each.value for each in recommendations(facts)}
    assert found["micro_batch_size_per_gpu_forward"] > found["micro_batch_size_per_gpu"]
    assert MemoryPlan(with_all(facts)).fits
    more = with_forward_rows(facts, 128)
    assert MemoryPlan(more).need("logprobs") > MemoryPlan(facts).need("logprobs")
    assert MemoryPlan(more).need("update") == MemoryPlan(facts).need("update")


def test_memory_that_forward_passes_leave_is_said() -> None:
    facts = on(60, make_facts(reference=ModelInputs(LLAMA, FUSED)))
    assert "GiB stay free in those passes" in recommended(facts, "max_tokens_per_gpu_forward")
    unread = on(60, make_facts(logprobs_every_step=False))
    assert not [each for each in recommendations(unread) if each.key.endswith("forward")]


def test_a_critic_has_as_large_passes_as_fit_beside_the_policy_s() -> None:
    """Catches a plan of a critic that has the policy's passes, and a budget that is not the largest."""
    facts = on(100, make_facts(traits=EAGER, critic=ModelInputs(LLAMA, EAGER, 8.0)))
    found = {each.key: each.value for each in recommendations(facts)}
    update, own = found["model.batch.max_tokens_per_gpu"], found["model.critic.max_tokens_per_gpu"]
    assert update < own < 128 * 768
    sizes = replace(facts.sizes, max_tokens={"update": update, "forward": 2 * update})
    fits = [MemoryPlan(replace(facts, sizes=replace(sizes, critic_tokens=own + more))).fits for more in (0, 1024)]
    assert fits == [True, False]
    forward = found["model.critic.max_tokens_per_gpu_forward"]
    assert forward > 2 * own
    sizes = replace(sizes, critic_tokens=own)
    assert MemoryPlan(replace(facts, sizes=replace(sizes, critic_tokens_forward=forward))).fits


def test_an_engine_takes_no_more_gpus_than_it_needs() -> None:
    facts = make_facts(mesh=MeshSizes(1, 4, 1, 1), engine=make_engine(0.4), completions=64)
    assert "1 fits; 2 took" in recommended(with_engine_gpus(facts, 2), "tensor_parallel_size")
    large = replace(with_engine_gpus(facts, 2), completions=10_000)
    assert not [each for each in recommendations(large) if each.key.endswith("tensor_parallel_size")]


def test_a_tight_budget_is_told_what_is_usual() -> None:
    assert "twice the longest sequence is usual" in recommended(with_budget(make_facts(), 800), BUDGET)
    assert "usual" not in recommended(with_budget(make_facts(), 2048), BUDGET)
