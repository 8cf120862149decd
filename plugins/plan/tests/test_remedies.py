"""Each remedy is named when it is the smallest that makes the plan fit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from memory_cases import AWAKE_SIZES, EAGER, FUSED, LLAMA, QWEN, make_engine, make_facts, on, smallest_change
from rlplug_plan.inputs import MemoryInputs, ModelInputs
from rlplug_plan.levers import LEVERS, OFFLOADS
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.resize import with_budget

from rlplug.interfaces.memory_plan import GPU
from rlplug.types import MeshSizes

AWAKE = make_facts(**AWAKE_SIZES)
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
    "budget": (on(45, make_facts()), [f"{BUDGET}: 9216"]),
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
    mesh = MeshSizes(1, num_gpus, 1, 1)
    facts = replace(facts, mesh=mesh, offload=random.choice(OFFLOADS))
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
    assert found[0].startswith("2 GPUs")


def test_a_model_that_no_number_of_gpus_holds_has_no_remedy() -> None:
    assert smallest_change(on(2, make_facts(QWEN))) == []


def test_an_engine_is_made_no_smaller_than_one_sequence() -> None:
    engine = make_engine(0.4)
    facts = on(100, make_facts(engine=replace(engine, least_kv_cache=engine.kv_cache)))
    assert not any("utilization" in text for text in smallest_change(facts))


def test_the_reference_fuses_its_logits_too() -> None:
    logits = replace(FUSED, logits_chunk=None)
    (fused,) = [lever for lever in LEVERS if lever.name == "fused"]
    facts = fused.apply(make_facts(traits=logits, reference=ModelInputs(LLAMA, logits)), "FusedLogprobs")
    assert facts.policy.traits == FUSED
    assert facts.reference == ModelInputs(LLAMA, FUSED)
