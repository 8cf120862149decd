"""The strategy on 1 and 2 real processes: shards, clipping, gathering. Gradients are in test_update.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlplug.distributed.fsdp_units import transformer_blocks

ranks = pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])


@ranks
def test_one_mesh_over_all_processes(world_size, updated):
    parts = updated(world_size)[1]["strategy"]
    assert (parts["world_size"], parts["mesh_size"]) == (world_size, world_size)


@ranks
def test_blocks_and_the_rest_are_sharded(world_size, updated, model_folder, load_policy):
    parts = updated(world_size)[1]["strategy"]
    assert parts["units"] == ["", "model.layers.0", "model.layers.1"]
    total = sum(parameter.numel() for parameter in load_policy(model_folder("qwen2")).parameters())
    assert parts["local_elements"] == [total // world_size] * world_size


@ranks
def test_passes_run_in_the_dtype_of_the_policy_and_the_rest_in_float32(world_size, updated):
    assert updated(world_size)[1]["strategy"]["dtypes"] == ["{torch.float32}", "torch.bfloat16", "torch.float32"]


@ranks
@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e6])
def test_clip_grad_norm_is_that_of_torch_on_the_full_model(max_norm, world_size, updated, model_folder, load_policy):
    result = updated(world_size)[1]["clip"][max_norm]
    policy = load_policy(model_folder("qwen2"))
    for name, parameter in policy.named_parameters():
        parameter.grad = result["before"][name].clone()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), float("inf") if max_norm is None else max_norm)
    assert result["norm"] == pytest.approx(norm.item(), rel=1e-6)
    assert result["norm"] > 0.1
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(result["after"][name], parameter.grad, rtol=1e-5, atol=1e-12)
    if max_norm != 1e-3:
        assert all(torch.equal(result["after"][name], tensor) for name, tensor in result["before"].items())


@ranks
def test_gather_is_in_rank_order(world_size, updated):
    parts = updated(world_size)[1]["strategy"]
    assert parts["gathered"] == ["0a", "0b", "1a", "1b"][: 2 * world_size]
    assert parts["gathered_unevenly"] == ["x"] * (world_size - 1)
    assert parts["any_rank"] == [False, True, True]


@ranks
def test_buckets_of_a_sharded_model_are_whole(world_size, updated, model_folder, load_policy):
    buckets = updated(world_size)[1]["strategy"]["buckets"]
    expected = dict(load_policy(model_folder("qwen2")).named_parameters())
    sent = [pair for bucket in buckets for pair in bucket]
    assert [name for name, _ in sent] == list(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent)
    assert len(buckets) > 2
    assert all(len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 1 << 14 for bucket in buckets)


@ranks
def test_export_of_a_sharded_model(world_size, updated):
    folder, results = updated(world_size)
    config = AutoConfig.from_pretrained(folder / "exported")
    assert config.architectures == ["Qwen2ForCausalLM"]
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder / "exported").named_parameters())
    after = results["actor_critic"]["after"]  # of the last update before the export
    policy = {name: tensor for name, tensor in after.items() if not name.startswith("critic.")}
    assert loaded.keys() == policy.keys()
    for name, tensor in policy.items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name


@pytest.mark.parametrize(("family", "num_blocks"), [("llama", 2), ("qwen2", 2), ("gpt2", 3)])
def test_transformer_blocks(family, num_blocks, model_folder, load_policy):
    policy = load_policy(model_folder(family))
    blocks = transformer_blocks(policy)
    assert len(blocks) == num_blocks == policy.config.num_hidden_layers
    assert len({type(block) for block in blocks}) == 1
    outside = {id(p) for p in policy.parameters()} - {id(p) for block in blocks for p in block.parameters()}
    assert 2 <= len(outside) <= 5  # embeddings, the last norm and the head


def test_a_model_without_blocks():
    assert transformer_blocks(nn.Linear(2, 2)) == []
