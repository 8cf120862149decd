"""No change that the plan prints is beaten by a smaller one, found by trying all combinations of the same keys.

The keys, their values and what they do to a run are written here a second time: only the plan and the order of changes
are the plugin's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from memory_cases import EAGER, FUSED, LLAMA, QWEN, make_engine, make_facts
from rlplug_plan.inputs import MemoryInputs, ModelInputs, Possible
from rlplug_plan.plan import MemoryPlan
from rlplug_plan.remedies import ON_SHORTFALL, find_remedies, order

from rlplug.interfaces.memory_plan import GPU
from rlplug.types import MeshSizes

NUM_RUNS = 200
MOST_KEYS = 3
"""Keys of the largest combinations that are all tried."""
OFFLOADS = ("none", "optimizer", "optimizer_and_weights")
TRAINING = ("8-bit", "lora")
ANY = 1_000_000
"""Above every number of GPUs, and every place in the order."""
Run = MemoryInputs


# ---- the keys, once more ------------------------------------------------------------------------------------------


def on_mesh(run: Run, mesh: MeshSizes) -> Run:
    assert min(mesh.shard, mesh.sequence, mesh.tensor) >= 1
    times = mesh.world_size // run.mesh.world_size
    sizes = replace(run.sizes, sequence_size=mesh.sequence, data_size=mesh.replicate * mesh.shard)
    if sizes.max_tokens and not sizes.update_is_set and mesh.sequence != run.mesh.sequence:
        part = max(16384, -(-2 * sizes.longest // mesh.sequence))
        update = -(-part // 1024) * 1024
        forward = sizes.max_tokens["forward"] if sizes.forward_is_set else 2 * update
        sizes = replace(sizes, max_tokens={"update": update, "forward": forward})
    networks = {"policy": run.policy, "reference": run.reference, "critic": run.critic}
    split = {name: replace(network, tensor=mesh.tensor) for name, network in networks.items() if network}
    engine = run.engine
    if engine is not None and engine.rows and times > 1:
        rows = -(-engine.rows // times)
        engine = replace(
            engine, rows=rows, kv_cache=engine.kv_cache * rows // engine.rows, other=engine.other * rows // engine.rows
        )
    return replace(run, mesh=mesh, sizes=sizes, engine=engine, completions=-(-run.completions // times), **split)


def shared(run: Run, share: float) -> Run:
    assert run.engine is not None
    base = run.engine.weights + (run.engine.other if run.engine.share_has_passes else 0)
    return replace(run, engine=replace(run.engine, kv_cache=int(share * run.gpu.total) - base))


def shares(run: Run, holds_all: bool) -> list[float]:
    engine = run.engine
    if engine is None or engine.least_kv_cache is None:
        return []
    wanted = max(run.completions * run.sizes.longest * engine.kv_bytes_per_token, engine.least_kv_cache)
    found = []
    for hundredths in range(1, 100):
        cache = shared(run, hundredths / 100).engine.kv_cache  # type: ignore[union-attr]
        if engine.least_kv_cache <= cache < engine.kv_cache and (cache >= wanted) is holds_all:
            found.append(hundredths / 100)
    return found


def tokens(run: Run, kind: str, budget: int) -> Run:
    budgets: dict[Any, int] = {**run.sizes.max_tokens, kind: budget}
    if kind == "update" and not run.sizes.forward_is_set:
        budgets["forward"] = 2 * budget
    is_set = run.sizes.forward_is_set or kind == "forward"
    return replace(run, sizes=replace(run.sizes, max_tokens=budgets, forward_is_set=is_set))


def budgets(run: Run, kind: Any) -> list[int]:
    if run.sizes.micro_batch_size:
        return []
    least, now = -(-run.sizes.longest // run.sizes.sequence_size), run.sizes.max_tokens[kind]
    return [budget for budget in range(least, now) if budget % 1024 == 0 or budget == least]


def traits(run: Run, *names: str, **changed: Any) -> Run:
    networks = {name: getattr(run, name) for name in names if getattr(run, name) is not None}
    new = {name: replace(network, traits=replace(network.traits, **changed)) for name, network in networks.items()}
    return replace(run, **new)


def adapters(run: Run) -> Run:
    (query, key, mlp), width = run.policy.whole.widths, run.policy.whole.hidden
    number = 16 * run.policy.whole.num_blocks * (4 * width + 2 * query + 2 * key + 3 * (width + mlp))
    return replace(run, policy=replace(run.policy, adapters=number), reference=None)


def axis_sizes(run: Run, axis: str) -> list[int]:
    now, possible = getattr(run.mesh, axis), run.possible
    sizes = [n for n in range(now + 1, run.mesh.shard * now + 1) if run.mesh.shard * now % n == 0]
    if axis not in possible.axes or (axis == "tensor" and run.policy.adapters is not None):
        return []
    if axis == "tensor":
        widths = (possible.heads, possible.kv_heads, run.policy.whole.widths.mlp)
        return [n for n in sizes if all(width % n == 0 for width in widths)]
    heads, kv_heads = possible.heads // run.mesh.tensor, possible.kv_heads // run.mesh.tensor
    return [n for n in sizes if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def with_axis(run: Run, axis: str, size: int) -> Run:
    now = getattr(run.mesh, axis)
    return on_mesh(run, replace(run.mesh, shard=run.mesh.shard * now // size, **{axis: size}))


def engine_sizes(run: Run) -> list[int]:
    if run.engine is None or run.engine.least_kv_cache is None or not run.possible.larger_engines:
        return []
    sizes = [run.engine_gpus * n for n in range(2, run.num_gpus + 1)]
    heads, kv_heads = run.possible.heads, run.possible.kv_heads
    return [n for n in sizes if run.num_gpus % n == 0 and heads % n == 0 and kv_heads % n == 0]


def with_engine(run: Run, size: int) -> Run:
    engine, now = run.engine, run.engine_gpus
    assert engine is not None
    assert engine.least_kv_cache is not None
    names = ("weights", "kv_bytes_per_token", "least_kv_cache")
    new: Any = replace(engine, **{name: getattr(engine, name) * now // size for name in names})
    new = replace(new, kv_cache=max(new.least_kv_cache, engine.kv_cache + engine.share_base - new.share_base))
    return replace(run, engine=new, engine_gpus=size, completions=run.completions * size // now)


def gpus(run: Run) -> list[int]:
    numbers = [run.num_gpus * 2**power for power in range(1, 7)]
    sizes, prompts = run.sizes, run.possible.prompts_per_step
    return [
        n
        for n in numbers
        if prompts is None
        or (prompts % n == 0 and n // run.num_gpus * run.mesh.data_size <= max(sizes.update_rows, sizes.data_size))
    ]


def adds(run: Run, name: str, is_weaker: bool) -> list[str]:
    return [name] if name in run.possible.optimizations and is_weaker else []


def halves(value: int, least: int) -> Iterator[int]:
    while value > least:
        value = max(value // 2, least)
        yield value


def rows(run: Run, number: int) -> Run:
    engine = run.engine
    assert engine is not None
    part = {"kv_cache": engine.kv_cache * number // engine.rows, "other": engine.other * number // engine.rows}
    return replace(run, engine=replace(engine, rows=number, **part))


def passes(run: Run) -> list[int]:
    if run.sizes.micro_batch_size is None:
        return budgets(run, "update")
    return list(range(1, min(run.sizes.micro_batch_size, run.sizes.rows("update"))))


def with_passes(run: Run, size: int) -> Run:
    if run.sizes.micro_batch_size is None:
        return tokens(run, "update", size)
    return replace(run, sizes=replace(run.sizes, micro_batch_size=size))


def forward_passes(run: Run) -> list[int]:
    if run.sizes.micro_batch_size is None:
        return budgets(run, "forward")
    now = run.sizes.micro_batch_size_forward or run.sizes.micro_batch_size
    return list(range(1, min(now, run.sizes.rows("forward"))))


def with_forward_passes(run: Run, size: int) -> Run:
    if run.sizes.micro_batch_size is None:
        return tokens(run, "forward", size)
    return replace(run, sizes=replace(run.sizes, micro_batch_size_forward=size))


def critic_budgets(run: Run, is_forward: bool = False) -> list[int]:
    sizes, now = run.sizes, run.sizes.critic_tokens or 0
    if is_forward and (now or sizes.critic_tokens_forward):
        now = sizes.critic_tokens_forward or 2 * now
    least = -(-sizes.longest // sizes.sequence_size)
    return [budget for budget in range(least, now) if budget % 1024 == 0 or budget == least]


def recomputes(run: Run) -> tuple[str, int]:
    return run.policy.traits.recompute, run.policy.traits.recompute_every


KEYS: dict[str, tuple[Callable[[Run], Any], Callable[[Run, Any], Run]]] = {
    "tensor": (lambda run: axis_sizes(run, "tensor"), lambda run, size: with_axis(run, "tensor", size)),
    "sequence": (lambda run: axis_sizes(run, "sequence"), lambda run, size: with_axis(run, "sequence", size)),
    "engine GPUs": (engine_sizes, with_engine),
    "8-bit": (
        lambda run: (
            ["torchao.optim.AdamW8bit"]
            * (run.possible.adamw_8bit and run.policy.adapters is None and run.policy.state_bytes == 8)
        ),
        lambda run, _: replace(run, policy=replace(run.policy, state_bytes=2.03125)),
    ),
    "lora": (
        lambda run: [16] * (run.possible.lora and run.policy.adapters is None),
        lambda run, _: adapters(run),
    ),
    "bucket": (
        lambda run: [size >> 20 for size in halves(run.bucket_bytes, 64 << 20)],
        lambda run, mib: replace(run, bucket_bytes=mib << 20),
    ),
    "sleep": (
        lambda run: [True] * (run.engine_can_sleep and not run.sleeps),
        lambda run, _: replace(run, sleeps=True),
    ),
    "spare share": (lambda run: shares(run, True), shared),
    "share": (lambda run: shares(run, False), shared),
    "reshard": (
        lambda run: [True] * (run.num_gpus > 1 and not run.reshard_after_forward),
        lambda run, _: replace(run, reshard_after_forward=True),
    ),
    "offload": (
        lambda run: OFFLOADS[OFFLOADS.index(run.offload) + 1 :],
        lambda run, mode: replace(run, offload=mode),
    ),
    "fused": (
        lambda run: adds(
            run, "FusedLogprobs", run.policy.traits.logits_chunk is None or run.policy.traits.keeps_logits
        ),
        lambda run, _: traits(
            run, "policy", "reference", logits_chunk=run.policy.traits.logits_chunk or 4096, keeps_logits=False
        ),
    ),
    "sync": (
        lambda run: [True] * (run.shards > 1 and not run.sync_every_micro_batch),
        lambda run, _: replace(run, sync_every_micro_batch=True),
    ),
    "rows": (lambda run: halves(run.engine.rows, 1) if run.engine else [], rows),
    "critic passes": (critic_budgets, lambda run, size: replace(run, sizes=replace(run.sizes, critic_tokens=size))),
    "passes": (passes, with_passes),
    "forward": (forward_passes, with_forward_passes),
    "critic forward": (
        lambda run: critic_budgets(run, is_forward=True),
        lambda run, size: replace(run, sizes=replace(run.sizes, critic_tokens_forward=size)),
    ),
    "selective": (
        lambda run: adds(run, "SelectiveCheckpointing", recomputes(run)[0] == "nothing"),
        lambda run, _: traits(run, "policy", "critic", recompute="all_but_products", recompute_every=1),
    ),
    "checkpointing": (
        lambda run: adds(run, "GradientCheckpointing", recomputes(run) != ("all", 1)),
        lambda run, _: traits(run, "policy", "critic", recompute="all", recompute_every=1),
    ),
    "activations": (
        lambda run: adds(run, "ActivationOffload", not run.policy.traits.activations_on_host),
        lambda run, _: traits(run, "policy", "critic", activations_on_host=True),
    ),
}
"""Values and effect of each key, in the order in which they are set."""


# ---- all combinations ---------------------------------------------------------------------------------------------


def settings(run: Run, names: Sequence[str]) -> Iterator[tuple[list[tuple[str, Any]], Run]]:
    """Yield every combination of values of the keys, and the run with it."""
    if not names:
        yield [], run
        return
    values, apply = KEYS[names[0]]
    for value in values(run):
        for rest, changed in settings(apply(run, value), names[1:]):
            yield [(names[0], value), *rest], changed


def smaller(run: Run, names: Sequence[str], than: tuple[Any, ...], before: Sequence[tuple[str, Any]]) -> Any:
    """Return a combination of at most three keys that fits and is smaller than another, or nothing."""
    for count in range(min(MOST_KEYS, than[2]) + 1):
        for chosen in itertools.combinations(names, count):
            ranks = order([*before, *((name, 0) for name in chosen)])[2:4] if chosen or before else (0, [])
            if tuple(ranks) > than[2:4]:
                continue
            for found, changed in settings(run, chosen):
                if (found or before) and order([*before, *found]) < than and MemoryPlan(changed).fits:
                    return [*before, *found]
    return None


def beaten_gpus(run: Run, names: Sequence[str], changes: Sequence[tuple[str, Any]], is_simplest: bool) -> Any:
    """Return a change with fewer GPUs, or with as many and less else; the simplest has fewer keys, then fewer GPUs."""
    number, count = changes[0][1], len(changes)
    for other in gpus(run):
        larger = on_mesh(run, replace(run.mesh, shard=other // run.num_gpus * run.mesh.shard))
        than = order(changes)
        if is_simplest and other != number:
            than = (ANY, False, count - (other > number), [ANY], [])
        if (is_simplest or other <= number) and (found := smaller(larger, names, than, [("GPUs", other)])):
            return found
    return None


def beaten(run: Run, remedy: Any, is_simplest: bool = False) -> Any:
    """Return a smaller change than a printed one that fits as well, with the same kind of change; or nothing."""
    changes = [(setting.name, setting.value) for setting in remedy.settings]
    kinds = [change for change in changes if change[0] in (*TRAINING, "GPUs")]
    little = [name for name in KEYS if name not in TRAINING]
    if not kinds:
        return smaller(run, little, order(changes), [])
    if kinds[0][0] == "GPUs":
        return beaten_gpus(run, little, changes, is_simplest)
    for name in TRAINING:
        values, apply = KEYS[name]
        for value in values(run):
            if found := smaller(apply(run, value), little, order(changes), [(name, value)]):
                return found
    return None


# ---- the runs -----------------------------------------------------------------------------------------------------


def random_run(seed: int) -> Run:
    """Return a run of any kind on a GPU that lacks something between a hundredth and most of what it needs."""
    random = Random(seed)
    chance = random.random
    replicas, shard = random.choice([(1, 1), (1, 2), (1, 4), (1, 8), (2, 4)])
    shape, prompt = random.choice([LLAMA, QWEN]), random.choice([256, 2048])
    completion = random.choice([256, 2048, 4096, 30000]) - prompt % 256
    longest = prompt + completion
    budget = longest + random.choice([0, 100, 1500, 4000])
    size_of = random.choice(["tokens", "tokens", "rows"])
    own = random.choice([EAGER, FUSED, replace(FUSED, keeps_logits=True), replace(EAGER, recompute="all_but_products")])
    run = make_facts(shape, random.choice([1, 8, 32]), prompt, completion, own, mesh=MeshSizes(replicas, shard, 1, 1))
    sizes = replace(run.sizes, max_tokens={"update": budget, "forward": 2 * budget})
    if size_of == "rows":
        sizes = replace(sizes, max_tokens={}, micro_batch_size=random.choice([2, 4]))
    elif longest > 4096 or chance() < 0.5:  # few budgets to try, or one far above the update's
        forward = longest + 2048 if longest > 4096 or chance() < 0.5 else 8 * budget
        sizes = replace(sizes, max_tokens={"update": budget, "forward": forward}, forward_is_set=True)
    if sizes.max_tokens and chance() < 0.3:
        default = max(16384, -(-2 * longest // 1024) * 1024)
        forward = longest + 2048
        sizes = replace(
            sizes, max_tokens={"update": default, "forward": forward}, update_is_set=False, forward_is_set=True
        )
    rest = ("FusedLogprobs", "SelectiveCheckpointing", "GradientCheckpointing", "ActivationOffload")
    possible = Possible(
        heads=32,
        kv_heads=8 if shape is QWEN else 32,
        axes=frozenset(axis for axis in ("sequence", "tensor") if chance() < 0.6),
        prompts_per_step=random.choice([None, 8, 32]),
        optimizations=frozenset(name for name in rest if chance() < 0.7),
        lora=chance() < 0.5,
        adamw_8bit=chance() < 0.5,
        larger_engines=chance() < 0.5,
    )
    run = replace(
        run,
        sizes=sizes,
        possible=possible,
        offload=random.choice(["none", "none", "optimizer"]),
        reshard_after_forward=chance() < 0.7,
        sync_every_micro_batch=chance() < 0.3,
        bucket_bytes=random.choice([64, 200]) << 20,
        reference=ModelInputs(shape, own) if chance() < 0.3 else None,
        critic=ModelInputs(shape, own, 8.0) if chance() < 0.2 else None,
    )
    if run.critic is not None and sizes.max_tokens and Random(seed + 0.5).random() < 0.7:  # others stay as they were
        run = replace(run, sizes=replace(sizes, critic_tokens=max(longest, 2 * sizes.max_tokens["update"])))
    if Random(seed + 0.25).random() < 0.5:
        own = {"critic_tokens_forward": longest + 2048} if sizes.max_tokens else {"micro_batch_size_forward": 6}
        run = replace(run, sizes=replace(run.sizes, **own))
    total = MemoryPlan(run).need("update")
    if chance() < 0.6:
        engine = make_engine(0, shape, longest)
        total = max(total, 2 * engine.weights)
        cache = engine.least_kv_cache + int(random.uniform(0.01, 0.05) * total)  # type: ignore[operator]
        engine = replace(engine, kv_cache=cache)
        if chance() < 0.3:
            engine = replace(engine, least_kv_cache=None, keeps_cache=False, rows=random.choice([1, 4, 16]))
        sleeps = chance() < 0.3
        run = replace(
            run, engine=engine, engine_can_sleep=chance() < 0.6, sleeps=sleeps, completions=random.choice([1, 2, 8])
        )
    plan = MemoryPlan(run)
    total = int(plan.need(plan.tightest) * random.choice([0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2]) / 0.9)
    return replace(run, gpu=GPU(total, total, is_here=False))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2, 3))])
def test_no_printed_change_is_beaten_by_a_smaller_one(part: int) -> None:
    """Catches a key that the search does not know, an order that it does not keep, and a value milder than needed."""
    for seed in range(part * NUM_RUNS // 4, (part + 1) * NUM_RUNS // 4):
        run = random_run(seed)
        assert not MemoryPlan(run).fits
        remedies = find_remedies(run)
        if not remedies:
            assert beaten_by_any(run) is None, seed
        for index, remedy in enumerate(remedies):
            if remedy.settings[0].key == ON_SHORTFALL:
                single = smaller(run, [name for name in KEYS if name not in TRAINING], (0, False, 1, [ANY], []), [])
                assert single is None, (seed, single)
                continue
            assert MemoryPlan(remedy.facts).fits, seed
            names = [other.settings[0].name for other in remedies[:index]]
            found = beaten(run, remedy, is_simplest="GPUs" in names)
            assert found is None, (seed, remedy.text, found)


def beaten_by_any(run: Run) -> Any:
    return smaller(run, list(KEYS), (0, True, 2, [ANY], []), [])
