"""Critics on 1 and 2 real processes, against plain torch: one process, no FSDP, one unpadded row at a time."""

from __future__ import annotations

import pytest
import torch
from batch_fixtures import SPLITS
from critics import load_critic
from torch import nn
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError
from rlplug.models.config import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.models.critic.network import ValueHead

ranks = pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])


@pytest.fixture
def causal(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder("qwen2"))


def values_of(causal, head, batch, row):
    """Return a row's trained positions and the value of the state before each."""
    ids = batch.input_ids[row, : batch.lengths[row]]
    positions = batch.response_mask[row].nonzero().flatten()
    hidden = causal(ids[None], output_hidden_states=True).hidden_states[-1][0]  # after the last norm
    return positions, (hidden[positions - 1] @ head.linear.weight.T + head.linear.bias).squeeze(-1)


def value_loss(causal, head, batch):
    num_tokens, total = int(batch.response_mask.sum()), torch.zeros(())
    for row in range(batch.num_sequences):
        positions, values = values_of(causal, head, batch, row)
        total = total + ((values - batch.returns[row, positions]) ** 2).sum() / num_tokens
    return total


def assert_close(ours, theirs):
    """``theirs`` may have parameters without a gradient, such as the output layer of a critic's trunk."""
    found = {name: parameter.grad for name, parameter in theirs.items() if parameter.grad is not None}
    assert ours.keys() == found.keys()
    largest = max(gradient.abs().max().item() for gradient in found.values())
    assert largest > 1e-3
    for name, gradient in found.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=2e-6 * largest)


@ranks
def test_values_are_of_the_state_before_each_token(world_size, updated, update_batch, causal):
    results = updated(world_size)[1]
    heads = [ValueHead(48, seed=1), ValueHead(48, seed=2)]
    expected = [torch.zeros(update_batch.input_ids.shape) for _ in heads]
    with torch.no_grad():
        for row in range(update_batch.num_sequences):
            for head, whole in zip(heads, expected, strict=True):
                positions, values = values_of(causal, head, update_batch, row)
                whole[row, positions] = values
    torch.testing.assert_close(results["values"][0], expected[0], rtol=0, atol=1e-4)
    for name in [name for name in results if name.startswith("forward/")]:
        torch.testing.assert_close(results[name][2], expected[1], rtol=0, atol=1e-4)
    assert expected[0].abs().max() > 0.1


@ranks
@pytest.mark.parametrize("split", [*SPLITS, "own budget"])
def test_a_critic_of_its_own(split, world_size, updated, update_batch, causal):
    result, head = updated(world_size)[1][f"critic/{split}"], ValueHead(48, seed=1)
    loss = value_loss(causal, head, update_batch)
    loss.backward()
    assert result["metrics"]["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    trunk = {name.replace("model.", "trunk.", 1): parameter for name, parameter in causal.named_parameters()}
    assert_close(result["critic_gradients"], trunk | {f"head.{n}": p for n, p in head.named_parameters()})
    assert not result["gradients"]  # the policy stays out of it
    assert not result["head_gradients"]
    if split == "own budget":  # of 16 tokens, where the policy's has 40
        assert [len(passes) for passes in result["passes"]] == [{1: 7, 2: 4, 3: 3}[world_size]] * world_size


@ranks
@pytest.mark.parametrize("split", SPLITS)
def test_a_shared_trunk_gets_both_gradients(split, world_size, updated, update_batch, causal):
    results, head = updated(world_size)[1], ValueHead(48, seed=2)
    result, policy_alone = results[f"shared/{split}"], results[f"token/{split}"]
    loss = value_loss(causal, head, update_batch)
    (0.5 * loss).backward()
    assert result["metrics"]["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result["metrics"]["loss"] == pytest.approx(policy_alone["metrics"]["loss"], abs=1e-6)
    assert result["metrics"]["policy/ratio_max"] == pytest.approx(policy_alone["metrics"]["policy/ratio_max"])
    assert_close(result["head_gradients"], dict(head.named_parameters()))
    trunk = {name: p for name, p in causal.named_parameters() if p.grad is not None}
    for name, parameter in trunk.items():
        parameter.grad += policy_alone["gradients"][name]
    assert_close(result["gradients"], trunk)


@ranks
@pytest.mark.parametrize("split", SPLITS)
def test_warming_up_on_a_shared_trunk_moves_the_head_alone(split, world_size, updated, update_batch, causal):
    result, head = updated(world_size)[1][f"head/{split}"], ValueHead(48, seed=2)
    value_loss(causal, head, update_batch).backward()
    assert_close(result["head_gradients"], dict(head.named_parameters()))
    assert not result["gradients"]
    assert "loss" not in result["metrics"]


@ranks
def test_policy_and_critic_take_steps_of_their_own(world_size, updated, update_batch, causal):
    """The critic's gradients are clipped by its own norm, and the policy moves as it would without a critic."""
    result, head = updated(world_size)[1]["actor_critic"], ValueHead(48, seed=1)
    before, after = result["before"], result["after"]
    trunk = {n: before[f"critic.trunk.{n}"] for n, _ in causal.model.named_parameters()}
    causal.model.load_state_dict(trunk)
    head.load_state_dict({n: before[f"critic.head.{n}"] for n, _ in head.named_parameters()})
    value_loss(causal, head, update_batch).backward()
    parameters = [*causal.model.parameters(), *head.parameters()]
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    assert result["metrics"]["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert norm > 0.5
    for name, parameter in head.named_parameters():
        moved = after[f"critic.head.{name}"] - before[f"critic.head.{name}"]
        torch.testing.assert_close(moved, -0.05 * parameter.grad, rtol=1e-3, atol=1e-6)
    assert any(not torch.equal(after[n], before[n]) for n in before if not n.startswith("critic."))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": -1}, ["model.critic.warmup_steps", "-1"]),
        ({"value_coefficient": 1.0}, ["model.critic.value_coefficient", "1.0", "share_trunk"]),
        ({"value_coefficient": 0.0, "share_trunk": True}, ["model.critic.value_coefficient", "0.0"]),
        ({"share_trunk": True, "trunk": ModelConfig(path="x")}, ["model.critic.share_trunk", "model.critic.trunk"]),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ConfigError) as error:
        CriticConfig(**options)
    assert all(word in str(error.value) for word in words)


def test_a_trunk_that_is_not_there_is_named_by_its_own_key(model_folder):
    policy = ModelConfig(path=str(model_folder("llama")))
    with pytest.raises(ConfigError, match=r"model\.critic\.trunk\.path: the folder './none'"):
        load_critic(CriticConfig(trunk=ModelConfig(path="./none")), policy)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "gpt2"])
def test_every_family_has_a_trunk(family, model_folder):
    critic = load_critic(CriticConfig(), ModelConfig(path=str(model_folder(family))))
    assert critic(torch.tensor([0, 2]), {"input_ids": torch.tensor([[2, 3, 4]])}).shape == (2,)
    assert not any("lm_head" in name for name, _ in critic.named_parameters())
