"""What wraps blocks gives the loss and gradients of plain torch, alone and together, in whatever order it is listed."""

from __future__ import annotations

import itertools

import pytest
import torch
from optims_models import assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import (
    ActivationOffload,
    CompileBlocks,
    EntropyCheckpointing,
    EntropyChunking,
    FusedLogprobs,
    GradientCheckpointing,
    SelectiveCheckpointing,
)
from rlplug_optims.activation_offload import offload_blocks
from rlplug_optims.block_forward import WrapOrder, wrap_forward
from torch.utils._python_dispatch import TorchDispatchMode

from rlplug.distributed.fsdp_units import transformer_blocks
from rlplug.errors import ConfigError

FAMILIES = ("llama", "qwen3")


class Offload(ActivationOffload):
    """Without the demand for a GPU: copies are plain ones then."""

    def before_shard(self, model):
        self._blocks = transformer_blocks(model)
        self.stash = offload_blocks(self._blocks, self.min_bytes)


PARTS = {
    "checkpointing": GradientCheckpointing,
    "every second": lambda: GradientCheckpointing(every_n_blocks=2),
    "selective": SelectiveCheckpointing,
    "attention": lambda: SelectiveCheckpointing(save=["attention"]),
    "compile": lambda: CompileBlocks(dynamic=False, backend="aot_eager"),
    "offload": lambda: Offload(min_mib=0),
    "fused": lambda: FusedLogprobs(chunk_size=5),
    "chunks": lambda: EntropyChunking(chunk_size=5),
    "recomputed": EntropyCheckpointing,
}
TOGETHER = [
    ("checkpointing", "compile", "offload", "fused"),
    ("fused", "offload", "compile", "checkpointing"),
    ("compile", "every second", "fused", "offload"),
    ("selective", "compile", "offload", "chunks", "recomputed"),
    ("recomputed", "chunks", "offload", "compile", "selective"),
]


@pytest.fixture(scope="module")
def expected():
    results = {}
    for family, dtype in itertools.product(FAMILIES, (torch.float32, torch.bfloat16)):
        results[family, dtype] = plain_results(tiny_model(family, dtype, packed=False), tiny_batch())
    return results


def optimized(names, family="llama", dtype=torch.float32):
    torch._dynamo.reset()
    model = tiny_model(family, dtype)
    parts = [PARTS[name]() for name in names]
    for part in parts:
        part.before_shard(model)
    for part in parts:
        part.after_shard(model)
        assert part.effects(), part
    return optimized_results(model, tiny_batch()), parts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PARTS)
def test_alone_it_changes_no_result(name, family, expected):
    assert_same(optimized([name], family)[0], expected[family, torch.float32])


@pytest.mark.kit
@pytest.mark.parametrize("names", TOGETHER)
def test_together_in_any_order_they_change_no_result(names, expected):
    assert_same(optimized(names)[0], expected["llama", torch.float32])


@pytest.mark.nightly
@pytest.mark.parametrize("names", TOGETHER[-2:] + TOGETHER[:1])
def test_bfloat16_is_as_far_from_float32_as_plain_bfloat16_is(names, expected):
    exact, plain = expected["llama", torch.float32], expected["llama", torch.bfloat16]
    actual, _ = optimized(names, dtype=torch.bfloat16)

    def distance(results):
        return max(float((results.gradients[n].float() - g).norm() / g.norm()) for n, g in exact.gradients.items())

    assert distance(actual) < 1.5 * distance(plain) < 0.3  # eager attention rounds elsewhere than the fused one


@pytest.mark.parametrize("orders", itertools.permutations(WrapOrder))
def test_wrappers_nest_in_one_order(orders):
    ran, block = [], torch.nn.Identity()

    def noting(order):
        return lambda forward: lambda value: (ran.append(order.name), forward(value))[1]

    for order in orders:
        wrap_forward(block, order, noting(order))
    assert block(3) == 3
    assert ran == ["OFFLOAD", "COMPILE", "CHECKPOINT", "COMPILE_INSIDE"]


def test_what_others_wrap_is_not_lost():
    """Before and after ours it stays; in between it would be dropped when the forward method is put together again."""
    ran, block = [], torch.nn.Identity()

    def noting(name):
        return lambda forward: lambda value: (ran.append(name), forward(value))[1]

    block.forward = noting("first")(block.forward)
    for order in (WrapOrder.COMPILE, WrapOrder.CHECKPOINT):
        wrap_forward(block, order, noting(order.name))
    block.forward = noting("last")(block.forward)
    assert block(3) == 3
    assert ran == ["last", "COMPILE", "CHECKPOINT", "first"]
    with pytest.raises(ConfigError, match=r"Identity.*before or after"):
        wrap_forward(block, WrapOrder.OFFLOAD, noting("OFFLOAD"))


class MatrixProducts(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self):
        super().__init__()
        self.counts = {"mm": 0, "silu": 0, "attention": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        self.counts["mm"] += name.startswith(("mm", "addmm"))
        self.counts["silu"] += name.startswith("silu.")
        self.counts["attention"] += "attention" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


def counts_of(names):
    torch._dynamo.reset()
    model = tiny_model()
    for name in names:
        PARTS[name]().before_shard(model)
    with MatrixProducts() as mode:
        optimized_results(model, tiny_batch())
    return mode.counts


def test_what_is_recomputed_in_the_backward_pass():
    plain = counts_of([])
    assert plain["silu"] == plain["attention"] == 4  # blocks
    whole, half = counts_of(["checkpointing"]), counts_of(["every second"])
    selective, attention = counts_of(["selective"]), counts_of(["attention"])
    assert (whole["silu"], half["silu"], selective["silu"], attention["silu"]) == (8, 6, 8, 8)
    assert (whole["attention"], selective["attention"], attention["attention"]) == (8, 4, 4)
    # recomputation ends when all that is needed is there: the block's last product is not
    assert whole["mm"] - plain["mm"] == attention["mm"] - plain["mm"] == 4 * 6
    assert half["mm"] - plain["mm"] == 2 * 6
    assert selective["mm"] == plain["mm"]


def test_a_pass_without_gradients_saves_nothing():
    model = tiny_model()
    offload = Offload(min_mib=0)
    for part in (GradientCheckpointing(), offload):
        part.before_shard(model)
    with torch.no_grad():
        model(tiny_batch().input_ids)
    assert offload.stash.bytes_moved == 0


def test_effects_say_how_many_blocks():
    assert [e.description for e in optimized(["every second"])[1][0].effects()] == [
        "gradient checkpointing of 2 of 4 blocks"
    ]
    assert [e.description for e in optimized(["selective"])[1][0].effects()] == [
        "selective checkpointing of 4 blocks keeps matrix_products, attention"
    ]
    assert [e.description for e in optimized(["compile"])[1][0].effects()] == ["torch.compile on 4 blocks (aot_eager)"]
    assert [e.description for e in optimized(["offload"])[1][0].effects()] == [
        "activations of 4 blocks kept in pinned host memory"
    ]


@pytest.mark.parametrize("name", ["checkpointing", "selective", "compile", "offload"])
def test_a_model_without_blocks_is_not_changed(name):
    part = PARTS[name]()
    part.before_shard(torch.nn.Linear(2, 2))
    assert part.effects() == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradientCheckpointing(every_n_blocks=0), "every_n_blocks is 0"),
        (lambda: SelectiveCheckpointing(save=[]), "use GradientCheckpointing"),
        (lambda: SelectiveCheckpointing(save=["norms"]), "matrix_products, attention"),
        (lambda: ActivationOffload(min_mib=-1), "min_mib is -1"),
        (lambda: GradientCheckpointing(networks=["reference"]), r"networks is \['reference'\]: .* of policy, critic"),
        (lambda: CompileBlocks(networks=[]), "give one or more of policy, reference, critic"),
        (lambda: ActivationOffload().before_shard(tiny_model()), "no GPU"),
    ],
)
def test_what_cannot_be_is_refused(make, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        make()
