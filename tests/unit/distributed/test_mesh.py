"""The mesh, and sharded updates on it: gradients, norms and communication on 1, 2 and 4 real processes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError
from rlplug.types import MeshSizes

MESHES = {
    "one": (1, {}),
    "shard 2": (2, {}),
    "replicate 2": (2, {"replicate": 2}),
    "sequence 2": (2, {"sequence": 2}),
    "shard 4": (4, {}),
    "replicate 2 x shard 2": (4, {"replicate": 2}),
    "shard 2 x sequence 2": (4, {"sequence": 2}),
    "shard 2 x tensor 2": (4, {"tensor": 2}),
    "replicate 2 x tensor 2": (4, {"replicate": 2, "tensor": 2}),
    "sequence 2 x tensor 2": (4, {"sequence": 2, "tensor": 2}),
}
EAGER = {"sync_every_micro_batch": True, "reshard_after_forward": False, "reshard_after_backward": False}
meshes = pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.nightly if size == 4 else ()) for mesh, (size, _) in MESHES.items()]
)
FOUR = pytest.param(4, marks=pytest.mark.nightly)


def num_data_ranks(world_size, axes):
    return world_size // (axes.get("sequence", 1) * axes.get("tensor", 1))


def tokens_of(num_ranks):
    """int64 [data ranks, micro-batches, rows, tokens]"""
    return torch.randint(2, 32, (num_ranks, 2, 2, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def results(run_jobs, model_folder):
    """Return what the jobs of each number of processes gave."""
    done = {}

    def of(world_size):
        if world_size not in done:
            jobs = {
                name: update_job(model_folder("qwen3"), axes, size)
                for name, (size, axes) in MESHES.items()
                if size == world_size
            }
            axes = {"replicate": 2} if world_size == 4 else {}
            jobs["eager"] = update_job(model_folder("qwen3"), axes | EAGER, world_size)
            jobs["facts"] = {"kind": "facts", "axes": {"replicate": 2, "sequence": 2} if world_size == 4 else {}}
            if world_size == 2:
                jobs["away"] = {"kind": "away", "axes": {}}  # the last, as its failed collective closes connections
            done[world_size] = run_jobs(world_size, jobs)
        return done[world_size]

    return of


def update_job(folder, axes, world_size):
    tokens = tokens_of(num_data_ranks(world_size, axes)).tolist()
    return {"kind": "update", "folder": str(folder), "axes": axes, "tokens": tokens, "max_norm": 0.01}


def oracle(folder, num_ranks):
    """The whole model on all rows at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = tokens_of(num_ranks).flatten(0, 2)
    losses = cross_entropy(model(input_ids=rows).logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    weights = 1 + torch.arange(16).view(2, 8) % 5  # of the two rows of a micro-batch
    (-losses * weights.repeat(len(rows) // 2, 1)).sum().backward()
    return model


@meshes
def test_gradients_are_summed_over_rows(mesh, results, model_folder):
    world_size, axes = MESHES[mesh]
    found = results(world_size)[mesh]["gradients"]
    model = oracle(model_folder("qwen3"), num_data_ranks(world_size, axes))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5 * scale, msg=name)


@meshes
def test_norm_and_clipping_are_those_of_the_whole_model(mesh, results):
    """The oracle is torch's own function, on the gradients that were gathered before."""
    result = results(MESHES[mesh][0])[mesh]
    whole = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in result["gradients"].values()]
    for parameter, gradient in zip(whole, result["gradients"].values(), strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(whole, 0.01).item()
    assert norm > 100
    assert result["norm"] == pytest.approx([norm] * MESHES[mesh][0], rel=1e-6)
    assert result["norm_again"] == result["norm"][0]  # measuring alone changes nothing
    for parameter, clipped in zip(whole, result["clipped"].values(), strict=True):
        torch.testing.assert_close(clipped, parameter.grad, rtol=1e-5, atol=1e-12)


@meshes
def test_each_rank_holds_its_part(mesh, results, model_folder):
    world_size, axes = MESHES[mesh]
    result = results(world_size)[mesh]
    model = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"))
    split = [p.numel() for name, p in model.named_parameters() if "proj" in name]
    whole = [p.numel() for name, p in model.named_parameters() if "proj" not in name]
    num_weights_ranks = world_size // axes.get("replicate", 1) // axes.get("tensor", 1)
    expected = sum(split) // (num_weights_ranks * axes.get("tensor", 1)) + sum(whole) // num_weights_ranks
    assert result["local"] == [expected] * world_size
    layers = [f"model.layers.{index}" for index in range(3)]
    assert result["units"] == ["", "model.embed_tokens", *layers, "lm_head"]


@pytest.mark.parametrize(
    ("world_size", "mesh"), [(2, "shard 2"), pytest.param(4, "replicate 2 x shard 2", marks=pytest.mark.nightly)]
)
def test_gradients_meet_in_the_last_micro_batch_alone(world_size, mesh, results):
    (first, first_gathered), (last, last_gathered) = results(world_size)[mesh]["passes"]
    assert first == {"_allgather_base_": 12}  # six units, for the forward and for the backward pass
    replicas = {"allreduce_": 6} if world_size == 4 else {}
    assert last == {"_allgather_base_": 12, "_reduce_scatter_base_": 6} | replicas
    assert (first_gathered, last_gathered) == (0, 0)


@pytest.mark.parametrize("world_size", [2, FOUR])
def test_weights_stay_gathered_and_gradients_meet_each_time_by_choice(world_size, results, model_folder):
    result = results(world_size)["eager"]
    (first, first_gathered), (last, last_gathered) = result["passes"]
    assert first == {"_allgather_base_": 6, "_reduce_scatter_base_": 6}
    assert last == {"_reduce_scatter_base_": 6} | ({"allreduce_": 6} if world_size == 4 else {})
    assert (first_gathered, last_gathered) == (6, 0)
    for name, parameter in oracle(model_folder("qwen3"), world_size).named_parameters():
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(result["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_a_forward_only_pass_leaves_nothing_gathered(world_size, results):
    assert results(world_size)["eager"]["gathered_after_forward_only"] == 0


@pytest.mark.nightly
def test_who_computes_which_rows(results):
    """Replicate 2, shard 1, sequence 2: ranks 0 and 1 share the first rows, 2 and 3 the others."""
    facts = results(4)["facts"]
    assert [fact["data"] for fact in facts] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [fact["sequence"] for fact in facts] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    data_groups, sequence_groups = [[0, 2], [1, 3]] * 2, [[0, 1]] * 2 + [[2, 3]] * 2
    assert [fact["groups"] for fact in facts] == [list(pair) for pair in zip(data_groups, sequence_groups, strict=True)]
    assert [fact["sampler"] for fact in facts] == [{"num_replicas": 2, "rank": rank} for rank in (0, 0, 1, 1)]
    assert facts[0]["axes"] == ("replicate", "shard", "sequence", "tensor")
    assert {fact["tensor"] for fact in facts} == {1}


@pytest.mark.parametrize("world_size", [1, 2])
def test_by_default_all_ranks_shard(world_size, results):
    facts = results(world_size)["facts"]
    assert [fact["data"] for fact in facts] == [(rank, world_size) for rank in range(world_size)]
    assert [fact["groups"] for fact in facts] == [[list(range(world_size)), None]] * world_size


def test_ranks_wait_for_one_that_is_in_a_phase_for_longer_than_tensors_may_take(results):
    """Alone catches a rollout of 31 minutes on one rank that ends the others, whose collectives time out after 30."""
    found = results(2)["away"]
    waited = {"gather": [0, 1], "gather_arrays": [0, 1], "any_rank": True, "barrier": None, "broadcast": 1}
    assert found == waited | {"tensors": "failed"}


def test_the_shard_axis_takes_what_is_left():
    assert MeshSizes.from_world(24, replicate=2, sequence=3, tensor=2) == MeshSizes(2, 2, 3, 2)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor": 3}, r"init_args\.tensor is 3, which does not divide 8 ranks:"),
        ({"sequence": 0}, r"init_args\.sequence is 0, which does not divide 8 ranks:"),
        ({"replicate": -1}, r"init_args\.replicate is -1"),
        ({"tensor": 4, "sequence": 4}, r"init_args\.sequence is 4, which does not divide 2 ranks \(8 ranks in all"),
        ({"sequence": 2, "replicate": 8}, r"init_args\.replicate is 8, which does not divide 4 ranks \(8 ranks in all"),
    ],
)
def test_sizes_that_do_not_divide_are_named(axes, message):
    with pytest.raises(ConfigError, match=message):
        MeshSizes.from_world(8, **{"replicate": 1, "sequence": 1, "tensor": 1} | axes)
