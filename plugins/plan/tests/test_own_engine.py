"""Engines on GPUs of their own, the sizes of any engine, and what a critic costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from memory_cases import EAGER, FUSED, LLAMA, QWEN, make_engine, make_facts, on
from rlplug_plan.decisions import Decisions, shortfall
from rlplug_plan.engine_sizes import engine_sizes, prompt_tokens, requests_at_once
from rlplug_plan.inputs import MemoryInputs, ModelInputs, Possible
from rlplug_plan.own_engine import engine_side, own_engine_notes, own_engine_recommendations, own_engine_shortfall
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.recommendations import recommendations
from rlplug_plan.resize import with_engine_gpus, with_share
from rlplug_plan.table import memory_notes

from rlplug.interfaces.memory_plan import GPU
from rlplug.types import GIB, MeshSizes

PATH = "model.rollout.init_args."
HEADS = Possible(heads=32, kv_heads=8)


def names_sizes(requests: int, tokens: int) -> dict[str, Any]:
    return {"max_num_seqs": requests, "max_num_batched_tokens": tokens, "graphs": [1, 2, requests]}


def make_side(gpus: int = 2, size: int = 1, completions: int = 1024, gib: float = 80, **others: Any) -> MemoryInputs:
    """Return engines of Qwen3's 8B shape, of ``size`` GPUs each, for sequences of 4,096 tokens."""
    total = int(gib * GIB)
    whole = replace(make_engine(shape=QWEN, longest=4096), own_gpus=gpus)
    share = int(others.pop("share", 0.9) * total)
    engine = replace(whole, kv_cache=share - whole.share_base)
    facts = make_facts(QWEN, prompt=1024, completion=3072, mesh=MeshSizes(1, 8, 1, 1), completions=completions)
    facts = replace(facts, gpu=GPU(total, total, is_here=False), engine=engine, possible=HEADS, **others)
    side = engine_side(facts)
    if size == 1:
        return side
    sized = with_engine_gpus(side, size)
    assert sized.engine is not None
    cache = share - sized.engine.share_base
    return replace(sized, engine=replace(sized.engine, kv_cache=cache), completions=-(-completions * size // gpus))


def recommended(side: MemoryInputs) -> dict[str, Any]:
    return {each.key.removeprefix(PATH): each.value for each in own_engine_recommendations(side)}


def test_it_says_what_an_engine_takes_of_its_gpus() -> None:
    """Qwen3's 8B in bfloat16 has 15.3 GiB of weights, and keeps 147,456 bytes a token."""
    side = make_side(gpus=2)
    (note,) = own_engine_notes(side)
    assert "2 for 2 of 1" in note
    assert "weights 15.3 + KV cache 55.7 + other 1.0 = 72.0 GiB" in note
    assert f"{int(55.74 * GIB) // (4096 * 147_456)} of the 512 completions" in note


def test_gpus_that_an_engine_does_not_need_are_said() -> None:
    """On 80 GiB two copies of two hold 450 sequences at once and four of one 396; on 141 GiB 840 and 784."""
    few = own_engine_recommendations(make_side(gpus=4, size=2, completions=64))
    assert few[0].text.startswith(f"{PATH}tensor_parallel_size: 1 fits, with 4 engines; 2 took 1.4 s")
    many = recommended(make_side(gpus=4, size=2, completions=100_000))
    assert "tensor_parallel_size" not in many
    assert recommended(make_side(gpus=4, size=2, completions=100_000, gib=141))["tensor_parallel_size"] == 1
    assert recommended(make_side(gpus=4, completions=64, share=0.9)) == {}


def test_a_small_share_is_raised_to_what_holds_all() -> None:
    side = make_side(gpus=1, completions=64, share=0.3)
    share = recommended(side)["gpu_memory_utilization"]
    assert requests_at_once(with_share(side, share)) == 64
    assert requests_at_once(with_share(side, share - 0.01)) < 64
    assert recommended(make_side(gpus=1, completions=4096, share=0.3))["gpu_memory_utilization"] == 0.9


def test_an_engine_that_does_not_fit_is_a_shortfall_of_the_run() -> None:
    """Catches a run that starts although its servers cannot; the trainer's own GPUs have room."""
    side = make_side(gpus=2, gib=16)
    facts = make_facts(own_engine=side)
    assert MemoryPlan(facts).fits
    error = shortfall(MemoryPlan(facts))
    assert error is not None
    assert f"Smallest change that makes it fit: {PATH}tensor_parallel_size: 2." in str(error)
    assert "on_shortfall: warn" in str(error)
    assert "No number of its GPUs" in str(own_engine_shortfall(make_side(gpus=1, gib=16)))
    assert shortfall(MemoryPlan(make_facts(own_engine=make_side()))) is None


def awake(side: MemoryInputs, size: int, share: float | None) -> float:
    """Return the GiB that each GPU needs, computed anew: a part of weights and cache, passes, CUDA and NCCL."""
    engine, now = side.engine, side.engine_gpus
    assert engine is not None
    assert engine.least_kv_cache is not None
    weights, least = engine.weights * now / size, engine.least_kv_cache * now / size
    cache = engine.weights + engine.kv_cache - weights
    if share is not None:
        cache = share * side.gpu.total - weights - engine.other
    if cache < least - 8:
        return float("inf")
    return (weights + cache + engine.other) / GIB + 0.6 + (0.5 if size > 1 else 0)


def changes(side: MemoryInputs) -> Iterator[tuple[int, float | None]]:
    """Yield all changes: share alone, size alone, both; fewer GPUs first, then the nearer share, the larger of two."""
    engine = side.engine
    assert engine is not None
    now = math.ceil(100 * (engine.weights + engine.kv_cache + engine.other) / side.gpu.total)
    shares = [each / 100 for each in sorted(range(1, 100), key=lambda each: (abs(each - now), -each))]
    sizes = [size for size in (1, 2, 4, 8) if side.num_gpus % size == 0 and size > side.engine_gpus]
    yield from ((side.engine_gpus, share) for share in shares)
    yield from ((size, None) for size in sizes)
    yield from ((size, share) for size in sizes for share in shares)


@pytest.mark.parametrize("seed", range(40))
def test_no_change_of_an_own_engine_is_beaten(seed: int) -> None:
    """Catches a number of GPUs or a share that is more than what fits needs, by trying all of them."""
    random = Random(seed)
    gpus = random.choice([1, 2, 4, 8])
    size = random.choice([size for size in (1, 2, 4) if size <= gpus])
    side = make_side(gpus, size, random.choice([8, 512]), random.uniform(6, 24), share=random.uniform(0.2, 0.99))
    capacity = side.gpu.total / GIB
    found = own_engine_shortfall(side)
    assert (found is None) == (awake(side, size, None) <= capacity)
    if found is None:
        return
    best = next(((size, share) for size, share in changes(side) if awake(side, size, share) <= capacity), None)
    printed = found.partition("Smallest change that makes it fit: ")[2].rstrip(".")
    if best is None:
        assert "No number of its GPUs" in found
        return
    expected = {} if best[0] == size else {"tensor_parallel_size": str(best[0])}
    expected |= {} if best[1] is None else {"gpu_memory_utilization": str(best[1])}
    assert dict(part.removeprefix(PATH).split(": ") for part in printed.split(" and ")) == expected


# ---- sizes of any engine ------------------------------------------------------------------------------------------


def test_requests_are_all_that_an_engine_gets_or_that_its_cache_holds() -> None:
    assert requests_at_once(make_facts(engine=make_engine(0.4), completions=128)) == 128
    # 55.9 - 3.2 - 1.0 GiB hold 368 sequences of 768 tokens and 196,608 bytes
    crowded = make_facts(engine=make_engine(0.4), completions=1024)
    assert requests_at_once(crowded) == crowded.engine.kv_cache // (768 * 196_608)  # type: ignore[union-attr]
    assert requests_at_once(make_facts(engine=make_engine(0.4, kv_cache=1), completions=128)) == 1


@pytest.mark.parametrize(("completions", "tokens"), [(8, 2048), (96, 4096), (1024, 8192)])
def test_a_pass_takes_the_prompts_of_a_step_within_the_rule(completions: int, tokens: int) -> None:
    """Prompts of 256 tokens, each of 8 completions: 1, 12 and 128 of them."""
    facts = make_facts(engine=make_engine(0.4), completions=completions, group_size=8)
    assert prompt_tokens(facts) == tokens


def test_the_engine_names_its_options_and_the_plan_says_why() -> None:
    facts = make_facts(engine=make_engine(0.4), completions=96, group_size=8, size_options=names_sizes)
    found = {each.key: each for each in recommendations(facts)}
    assert found[f"{PATH}max_num_seqs"].value == 96
    assert "all 96 completions" in found[f"{PATH}max_num_seqs"].says
    assert "by a rule" in found[f"{PATH}max_num_seqs"].says
    assert found[f"{PATH}max_num_batched_tokens"].text == f"{PATH}max_num_batched_tokens: 4096"
    assert found[f"{PATH}graphs"].says == "3 sizes up to 96"
    assert engine_sizes(make_facts(completions=96, size_options=names_sizes)) == []


def test_sizes_follow_the_cache_that_is_recommended() -> None:
    """Catches requests of the share that the run has, beside a share that holds more or fewer."""
    facts = make_facts(engine=make_engine(0.1), completions=512, size_options=names_sizes)
    found = {each.key: each.value for each in recommendations(facts)}
    shared = with_share(facts, found[f"{PATH}gpu_memory_utilization"])
    assert found[f"{PATH}max_num_seqs"] == requests_at_once(shared) > requests_at_once(facts)


# ---- networks -----------------------------------------------------------------------------------------------------


def notes(facts: MemoryInputs) -> str:
    return "\n".join(memory_notes(Decisions(MemoryPlan(facts), "", (), ())))


def test_a_critic_is_said_with_what_it_costs() -> None:
    """LLAMA's 1.71B parameters over 4 GPUs: 1.59 GiB of weights and 3.19 of AdamW's state."""
    four = {"mesh": MeshSizes(1, 4, 1, 1), "critic": ModelInputs(LLAMA, FUSED, 8.0)}
    text = notes(make_facts(**four))
    assert "critic: 4.8 GiB of " in text
    assert "weights 1.6, optimizer state 3.2, and 0.0 more for its passes" in text
    assert "one mesh (replicate 1, shard 4, sequence 1, tensor 1) and one size of passes for policy and critic" in text
    facts = make_facts(**four)
    own = notes(replace(facts, sizes=replace(facts.sizes, critic_tokens=8192)))
    assert "tensor 1) for policy and critic; the critic's passes have 8,192 tokens" in own
    eager = notes(make_facts(critic=ModelInputs(LLAMA, EAGER, 8.0)))
    assert "and 0.0 more" not in eager
    reference = ModelInputs(LLAMA, FUSED)
    assert "for policy, reference and critic" in notes(make_facts(reference=reference, **four))
    assert "value head" in notes(make_facts(has_value_head=True))
    assert "mesh" not in notes(on(80, make_facts()))
