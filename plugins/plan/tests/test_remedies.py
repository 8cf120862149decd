"""Each remedy is named when it is the smallest that makes the plan fit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from memory_cases import EAGER, FUSED, LLAMA, QWEN, make_engine, make_facts
from rlplug_plan.inputs import MemoryInputs, ModelInputs
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.recommendations import recommendations
from rlplug_plan.remedies import OFFLOADS, fused_logprobs, smallest_change, with_budget, with_share

from rlplug.interfaces.memory_plan import GPU
from rlplug.types import GIB


def on(gib: float, facts: MemoryInputs) -> MemoryInputs:
    """Return the run on GPUs of which ``gib`` can be planned with."""
    total = round(gib / 0.9 * GIB)
    return replace(facts, gpu=GPU(total, total, is_here=False))


AWAKE = make_facts(engine=make_engine(0.4), engine_can_sleep=True)
ASLEEP = replace(AWAKE, sleeps=True)
BUDGET = "model.batch.max_tokens_per_gpu"
CASES = {
    # update 57.3 + 0.6, engine 55.9
    "sleep": (on(80, AWAKE), ["model.memory.sleep_between_rollouts: true"]),
    # the rollout holds 19.1 of the trainer and 55.9 + 0.6 of the engine; without state, 62.9
    "optimizer": (on(65, ASLEEP), ["model.memory.offload: optimizer"]),
    "weights": (on(60, ASLEEP), ["model.memory.offload: optimizer_and_weights"]),
    "logits": (on(62, make_facts(traits=replace(FUSED, logits_chunk=None), rows=512)), ["FusedLogprobs in"]),
    # 57.3 + 0.6 without the logits of 16,384 tokens
    "kept logits": (on(58.4, make_facts(traits=replace(FUSED, keeps_logits=True))), ["recompute: true"]),
    "engine": (on(100, make_facts(engine=make_engine(0.4))), ["gpu_memory_utilization: 0.37"]),
    "budget": (on(45, make_facts()), [f"{BUDGET}: 8192"]),
    "smaller budget": (on(33, make_facts()), [f"{BUDGET}: 2048"]),
    "checkpointing": (on(31, make_facts(completion=16128, rows=4)), ["GradientCheckpointing in"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smallest_change_is_named(name: str) -> None:
    facts, expected = CASES[name]
    assert not MemoryPlan(facts).fits
    found = smallest_change(facts)
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True)), found


def test_remedies_add_up_before_gpus_are_asked_for() -> None:
    facts = on(28.4, make_facts(traits=EAGER))
    alone = [on(28.4, make_facts(traits=replace(EAGER, recompute="all"))), with_budget(facts, 1024)]
    assert not any(MemoryPlan(one).fits for one in alone)
    found = smallest_change(facts)
    assert len(found) > 1
    assert not any("GPUs" in text for text in found)


def random_run(seed: int) -> MemoryInputs:
    """Return a run of any size that lacks at most a fiftieth of a GPU's memory."""
    random = Random(seed)
    size = random.choice([0.002, 0.05, 1.0])
    shape = replace(LLAMA, parameters=int(LLAMA.parameters * size), block_parameters=int(LLAMA.block_parameters * size))
    facts = make_facts(
        shape,
        random.choice([1, 32, 512]),
        completion=random.choice([8, 512, 4096]),
        traits=random.choice([EAGER, FUSED]),
    )
    num_gpus = random.choice([1, 2, 8])
    facts = replace(facts, num_gpus=num_gpus, shards=num_gpus, offload=random.choice(OFFLOADS))
    if random.random() < 0.7:
        engine = make_engine(random.choice([0.05, 0.2, 0.6]), shape)
        if random.random() < 0.5:
            engine = replace(engine, least_kv_cache=None, keeps_cache=False, rows=random.choice([1, 16, 256]))
        facts = replace(facts, engine=engine, engine_can_sleep=random.random() < 0.5, sleeps=random.random() < 0.5)
    plan = MemoryPlan(facts)
    need = plan.need(plan.tightest)
    total = int(need / (0.9 + random.uniform(0.0001, 0.02)))
    return replace(facts, gpu=GPU(total, total, is_here=False))


def test_a_small_shortfall_needs_one_small_change() -> None:
    """Catches sixteen GPUs, half a dozen keys, or nothing at all, for a tenth of a GiB."""
    for seed in range(400):
        facts = random_run(seed)
        if MemoryPlan(facts).fits:
            continue
        (text,) = smallest_change(facts)
        assert "GPUs" not in text, seed


def test_fewer_completions_at_once_make_an_engine_without_a_share_fit() -> None:
    engine = replace(make_engine(0.6), least_kv_cache=None, keeps_cache=False, rows=256)
    facts = replace(on(70, make_facts(engine=engine)), offload="optimizer_and_weights")
    assert smallest_change(facts) == ["model.rollout.init_args.max_batch_size: 128"]


def test_more_gpus_come_last_and_as_few_as_can_be() -> None:
    found = smallest_change(on(20, make_facts()))
    assert found[-1].startswith("2 GPUs")


def test_a_model_that_no_number_of_gpus_holds_has_no_remedy() -> None:
    assert smallest_change(on(2, make_facts(QWEN))) == []


def test_an_engine_is_made_no_smaller_than_one_sequence() -> None:
    engine = make_engine(0.4)
    facts = on(100, make_facts(engine=replace(engine, least_kv_cache=engine.kv_cache)))
    assert not any("utilization" in text for text in smallest_change(facts))


def test_the_reference_fuses_its_logits_too() -> None:
    logits = replace(FUSED, logits_chunk=None)
    (change,) = fused_logprobs(make_facts(traits=logits, reference=ModelInputs(LLAMA, logits)))
    assert change.facts.policy.traits == FUSED
    assert change.facts.reference == ModelInputs(LLAMA, FUSED)


# ---- recommendations ------------------------------------------------------------------------------------------------


def recommended(facts: MemoryInputs, key: str) -> str:
    (line,) = [line for line in recommendations(facts) if key in line]
    return line


def test_the_share_holds_all_completions_and_says_how_full_the_cache_is() -> None:
    facts = make_facts(engine=make_engine(0.4), completions=128)
    line = recommended(facts, "utilization")
    # 128 x 768 x 196,608 bytes = 18.0 GiB, weights 3.2, passes 1.0: 22.2 of 139.8
    assert ": 0.16; its KV cache of 18.2 GiB holds all 128 completions" in line
    assert "which use 99%" in line


def test_a_share_that_cannot_hold_them_is_the_largest_that_fits() -> None:
    facts = make_facts(engine=make_engine(0.4), completions=1024)
    line = recommended(facts, "utilization")
    assert "the most that fits" in line
    share = float(line.split(": ")[1].split(",")[0])
    assert MemoryPlan(with_share(facts, share)).fits
    assert not MemoryPlan(with_share(facts, share + 0.01)).fits


def test_the_budget_is_the_largest_that_fits() -> None:
    budget = int(recommended(on(80, make_facts()), BUDGET).rpartition(" ")[2])
    assert MemoryPlan(with_budget(on(80, make_facts()), budget)).fits
    assert not MemoryPlan(with_budget(on(80, make_facts()), budget + 2048)).fits


def test_offload_is_recommended_as_far_as_it_is_needed() -> None:
    assert recommended(replace(AWAKE, offload="optimizer"), "offload").endswith("none is enough")
    assert recommended(on(65, ASLEEP), "offload").endswith("optimizer is enough")
