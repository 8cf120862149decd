"""What moves to the host and back: each storage once, no parameters, and memory is given up when its time has come."""

from __future__ import annotations

import gc
import weakref

import torch
from optims_models import tiny_batch, tiny_model
from rlplug_optims.activation_offload import offload_blocks
from rlplug_optims.gradient_checkpointing import GradientCheckpointing
from rlplug_optims.host_stash import HostStash, _Storage
from torch import nn

from rlplug.distributed.fsdp_units import transformer_blocks


class Squares(nn.Module):
    """Saves its input, several views of it, its weight, and what all blocks share."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, hidden, shared):
        left, right = hidden.chunk(2, dim=1)
        return (
            hidden * hidden.flatten().view(hidden.shape) + (left * right).repeat(1, 2) + hidden @ self.weight * shared
        )


def run(blocks, hidden, shared):
    for block in blocks:
        hidden = block(hidden, shared)
    return hidden


def chain(min_bytes=0):
    torch.manual_seed(0)
    blocks = [Squares() for _ in range(4)]
    stash = offload_blocks(blocks, min_bytes)
    return blocks, stash, torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)


def test_a_storage_moves_once_and_what_is_shared_stays():
    blocks, stash, hidden, shared = chain()
    output = run(blocks, hidden, shared)
    assert stash.bytes_moved == 3 * (3 * 4) * 4  # the inputs of three blocks, in float32; the last block's stays
    held = [item for item in gc.get_objects() if type(item) is _Storage and item.on_device is not None]
    assert len(held) == 1
    output.sum().backward()
    blocks, stash, hidden, shared = chain(min_bytes=1000)
    run(blocks, hidden, shared)
    assert stash.bytes_moved == 0


def test_gradients_with_many_passes_open_at_a_time():
    blocks, _, hidden, shared = chain()
    losses = [run(blocks, hidden * scale, shared).square().sum() for scale in (0.1, 0.2, 0.3)]
    leaves = [hidden, *(block.weight for block in blocks)]
    found = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in reversed(losses)]
    again = [torch.autograd.grad(loss, leaves) for loss in reversed(losses)]
    plain = [Squares() for _ in range(4)]
    for block, other in zip(blocks, plain, strict=True):
        other.weight = block.weight
    for scale, gradients, repeated in zip((0.3, 0.2, 0.1), found, again, strict=True):
        expected = torch.autograd.grad(run(plain, hidden * scale, shared).square().sum(), leaves)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
        torch.testing.assert_close(repeated, expected, rtol=0, atol=0)


def devices_of(stash_blocks):
    return [[storage.on_device is not None for storage in block.storages.values()] for block in stash_blocks]


def test_two_blocks_are_on_the_device_at_a_time(monkeypatch):
    blocks, _, hidden, shared = chain()
    opened = []
    original = HostStash._copy_out
    watched = []

    def copy_out(self, block):
        original(self, block)
        opened.append(block)

    monkeypatch.setattr(HostStash, "_copy_out", copy_out)
    for block in blocks:
        block.register_full_backward_hook(lambda *_: watched.append(devices_of(opened)))
    output = run(blocks, hidden, shared)
    forward = devices_of(opened)
    output.sum().backward()
    assert forward == [[False], [False], [False]]  # the fourth stays, and the third is released when it has run
    # while a block runs backward, the one before it comes back, and what is behind is gone
    assert watched[0] == [[False], [False], [True]]
    assert watched[1] == [[False], [True], []]
    assert watched[2] == [[True], [], []]
    assert watched[3] == [[], [], []]


def test_a_number_comes_back_as_one():
    class Scaled(nn.Module):
        def forward(self, hidden):
            return hidden * hidden.square().sum()

    blocks = [Scaled(), Scaled()]
    offload_blocks(blocks, 0)
    hidden = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(blocks[1](blocks[0](hidden)).sum(), hidden)
    # x |x|^2 twice is x |x|^8, and its sum has the gradient |x|^8 + 8 x |x|^6 sum(x)
    torch.testing.assert_close(gradient, 5.0**4 + 8 * torch.tensor([1.0, 2.0]) * 5.0**3 * 3)


def test_a_dropped_pass_leaves_nothing():
    blocks, _, hidden, shared = chain()
    output = run(blocks, hidden, shared)
    kept = weakref.ref(next(iter(stash_of(output).storages.values())))
    del output
    gc.collect()
    assert kept() is None


def stash_of(output):
    """Find a block's record through the graph of ``output``."""
    nodes, seen = [output.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        raw = getattr(node, "_raw_saved_self", None)
        data = None if raw is None else raw.data if hasattr(raw, "data") else None
        if data is not None and hasattr(data, "block"):
            return data.block
        nodes += [parent for parent, _ in node.next_functions]
    raise AssertionError("nothing was stashed")


def test_with_checkpointing_only_inputs_move():
    model = tiny_model()
    GradientCheckpointing().before_shard(model)
    stash = offload_blocks(transformer_blocks(model), 0)
    batch = tiny_batch()
    model(batch.input_ids, use_cache=False).logits.sum().backward()
    num_bytes = batch.input_ids.numel() * model.config.hidden_size * 4
    assert stash.bytes_moved == 3 * num_bytes
