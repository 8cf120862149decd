"""The update on 1 to 3 real processes, against plain torch: one process, no FSDP, one unpadded row at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from batch_fixtures import SPLITS
from torch import nn

from rlplug.interfaces import Denominators
from rlplug.training.batch_plan import BatchPlan, BatchSizes
from rlplug.training.step_rows import StepRows
from rlplug.training.update import separate_memory_pool

TEMPERATURE, TOP_K, LEARNING_RATE, MAX_NORM = 0.8, 10, 0.05, 0.5  # as in update_worker.py
ROWS = {"some": [8, 3, 0, 10], "one": [5]}
FILLERS = {("one", 2): [0, 1], ("one", 3): [0, 1, 1], ("some", 3): [1, 1, 0]}
"""Padding batches of each rank, where there are any."""

ranks = pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 3))])


@pytest.fixture
def policy(model_folder, load_policy):
    return load_policy(model_folder("qwen2"))


def trained_tokens(policy, batch, row):
    """Return positions of a row's trained tokens, their logits [K, V] and their ids."""
    ids = batch.input_ids[row, : batch.lengths[row]]
    positions = batch.response_mask[row].nonzero().flatten()
    return positions, policy(ids[None]).logits[0, positions - 1] / TEMPERATURE, ids[positions]


def loss_of(policy, batch, rows, kind="token"):
    """The loss of ``kind`` over a mini-batch, by the equations in ``GRPO`` and with its entropy bonus."""
    num_tokens = sum(int(batch.response_mask[row].sum()) for row in rows)
    num_sequences = sum(bool(batch.response_mask[row].any()) for row in rows)
    clip, beta = (0.1, 0.1) if kind == "sequence" else (0.2, 0.0)
    total = torch.zeros(())
    for row in rows:
        positions, logits, tokens = trained_tokens(policy, batch, row)
        if len(positions) == 0:
            continue
        logprobs = logits.log_softmax(dim=-1)
        chosen = logprobs[range(len(tokens)), tokens]
        old = chosen.detach() if batch.old_logprobs is None else batch.old_logprobs[row, positions]
        ratio, advantages = (chosen - old).exp(), batch.advantages[row, positions]
        objective = torch.minimum(ratio * advantages, ratio.clip(1 - clip, 1 + clip) * advantages)
        away = batch.ref_logprobs[row, positions] - chosen
        objective = objective - beta * (away.exp() - away - 1)
        total = total - objective.sum() / (len(tokens) * num_sequences if kind == "sequence" else num_tokens)
        if kind == "entropy":
            total = total + 0.1 * (logprobs.exp() * logprobs).sum() / num_tokens
    return total


def gradients_of(policy, loss):
    policy.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def assert_equal_to_round_off(ours, theirs):
    assert ours.keys() == theirs.keys()
    largest = max(tensor.abs().max().item() for tensor in theirs.values())
    assert largest > 1e-3
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=2e-6 * largest)


@ranks
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["token", "sequence", "entropy"])
def test_gradients_do_not_depend_on_the_split(kind, split, world_size, updated, update_batch, policy):
    result = updated(world_size)[1][f"{kind}/{split}"]
    loss = loss_of(policy, update_batch, range(11), kind)
    assert result["metrics"]["loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert_equal_to_round_off(result["gradients"], gradients_of(policy, loss))


@ranks
@pytest.mark.parametrize("split", ["3", pytest.param("16 tokens", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["token", "sequence", "entropy", "gspo", "cispo", "dapo", "dr_grpo", "rloo"])
def test_parts_of_a_step_give_the_gradients_of_the_whole(name, split, world_size, updated, update_batch, policy):
    """Parts that run before the others are there, against plain torch where it has the loss, else one mini-batch."""
    result, waited = updated(world_size)[1][f"{name}/streamed {split}"], updated(world_size)[1][f"waited/{name}"]
    assert_equal_to_round_off(result["gradients"], waited["gradients"])
    assert waited["metrics"] == pytest.approx(
        {key: result["metrics"][key] for key in waited["metrics"]}, rel=1e-5, abs=1e-6
    )
    assert result["is_same"]
    assert_forward_equals(None, result["sampled"], update_batch, policy)
    assert result["metrics"]["partial/on_arrival_batches"] == 3
    if name in ("token", "sequence", "entropy"):
        loss = loss_of(policy, update_batch, range(11), name)
        assert_equal_to_round_off(result["gradients"], gradients_of(policy, loss))


@ranks
def test_an_algorithm_that_is_wrong_about_streaming_is_stopped(world_size, updated):
    results = updated(world_size)[1]
    message = results["divides by others/streamed 3"]
    assert "DividesByOthers.streamed_divisor is 'num_sequences'" in message
    assert "is not divided by num_sequences alone" in message
    assert "those of the whole step differ from those of its parts" in results["centres/streamed 3"]


@ranks
@pytest.mark.parametrize("name", ["some", "one"])
def test_a_mini_batch_is_normalised_by_its_own_rows(name, world_size, updated, update_batch, policy):
    """With one row, the other ranks have nothing but a padding batch."""
    result = updated(world_size)[1][f"rows/{name}"]
    loss = loss_of(policy, update_batch, ROWS[name])
    assert result["metrics"]["loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert_equal_to_round_off(result["gradients"], gradients_of(policy, loss))
    assert result["fillers"] == FILLERS.get((name, world_size), [0] * world_size)


@ranks
def test_metrics_are_of_the_whole_mini_batch(world_size, updated, update_batch, policy):
    entropies, clipped, kls, ratios = [], [], [], []
    for row in range(11):
        positions, logits, tokens = trained_tokens(policy, update_batch, row)
        logprobs = logits.log_softmax(dim=-1).detach()
        chosen = logprobs[range(len(tokens)), tokens]
        ratio = (chosen - update_batch.old_logprobs[row, positions]).exp()
        away = update_batch.ref_logprobs[row, positions] - chosen
        entropies += (-(logprobs.exp() * logprobs).sum(dim=-1)).tolist()
        kls += (away.exp() - away - 1).tolist()
        ratios += ratio.tolist()
        gains = update_batch.advantages[row, positions] > 0
        clipped += torch.where(gains, ratio > 1.1, ratio < 0.9).tolist()
    results = updated(world_size)[1]
    for name in [name for name in results if name.startswith("sequence/")]:
        metrics = results[name]["metrics"]
        assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
        assert metrics["policy/kl"] == pytest.approx(sum(kls) / len(kls), abs=1e-4)
        fraction = metrics["policy/clip_fraction_low"] + metrics["policy/clip_fraction_high"]
        assert fraction == pytest.approx(sum(clipped) / len(clipped), abs=1e-6)
        assert 0.1 < fraction < 0.9
        assert metrics["policy/ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
        assert metrics["policy/ratio_min"] == pytest.approx(min(ratios), rel=1e-4)


@ranks
@pytest.mark.parametrize("split", SPLITS)
def test_gradients_meet_in_the_last_pass_only(split, world_size, updated):
    result = updated(world_size)[1][f"token/{split}"]
    (num_passes,) = {len(passes) for passes in result["passes"]}
    assert (
        num_passes
        == {
            1: {"1": 11, "3": 4, "all": 1, "16 tokens": 7, "40 tokens": 3},
            2: {"1": 6, "3": 2, "all": 1, "16 tokens": 4, "40 tokens": 2},
            3: {"1": 4, "3": 2, "all": 1, "16 tokens": 3, "40 tokens": 1},
        }[world_size][split]
    )
    reductions = 3 if world_size > 1 else 0  # one of each FSDP unit: two blocks, and the rest
    for passes in result["passes"]:
        assert passes == [(0, False)] * (num_passes - 1) + [(reductions, True)]


@ranks
@pytest.mark.parametrize("split", SPLITS)
def test_forward_only_is_assembled_in_place(split, world_size, updated, update_batch, policy):
    logprobs, sampled, _ = updated(world_size)[1][f"forward/{split}"]
    assert logprobs.shape == sampled.shape == update_batch.input_ids.shape
    assert_forward_equals(logprobs, sampled, update_batch, policy)


def assert_forward_equals(logprobs, sampled, batch, policy):
    expected, expected_sampled = torch.zeros(batch.input_ids.shape), torch.zeros(batch.input_ids.shape)
    with torch.no_grad():
        for row in range(batch.num_sequences):
            positions, logits, tokens = trained_tokens(policy, batch, row)
            for position, scores, token in zip(positions.tolist(), logits, tokens.tolist(), strict=True):
                kept = sorted({*scores.topk(TOP_K).indices.tolist(), token})
                expected[row, position] = scores[token] - scores.logsumexp(dim=0)
                expected_sampled[row, position] = scores[token] - scores[kept].logsumexp(dim=0)
    if logprobs is not None:
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(sampled, expected_sampled, rtol=0, atol=2e-5)


def train(policy, result, batch, mini_batches):
    """Take plain SGD steps from where ``result`` began; return losses, gradient norms and the weights after."""
    policy.load_state_dict(result["before"], strict=False)  # without the tied head
    policy.tie_weights()
    optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for rows in mini_batches:
        optimizer.zero_grad()
        loss = loss_of(policy, batch, rows)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM).item())
        optimizer.step()
    return losses, norms, dict(policy.named_parameters())


def assert_steps_equal(result, reference):
    losses, norms, weights = reference
    assert result["metrics"]["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)
    assert result["metrics"]["policy/grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    assert any(not torch.equal(result["after"][name], tensor) for name, tensor in result["before"].items())
    for name, tensor in weights.items():
        torch.testing.assert_close(result["after"][name], tensor.detach(), rtol=0, atol=2e-5)


@ranks
def test_on_policy_step(world_size, updated, update_batch, policy):
    result, batch = updated(world_size)[1]["on_policy"], update_batch.replace(old_logprobs=None)
    reference = train(policy, result, batch, [range(11)])
    assert_steps_equal(result, reference)
    assert result["metrics"]["policy/clip_fraction_low"] == result["metrics"]["policy/clip_fraction_high"] == 0
    assert result["metrics"]["policy/ratio_max"] == result["metrics"]["policy/ratio_min"] == 1
    assert result["metrics"]["policy/skipped_updates"] == 0
    policy.load_state_dict(result["before"], strict=False)
    assert_forward_equals(None, result["sampled"], batch, policy)  # those of the policy that sampled


@ranks
def test_epochs_of_mini_batches(world_size, updated, update_batch, policy):
    result = updated(world_size)[1]["run"]
    plan = BatchPlan(BatchSizes(prompts_per_step=6, group_size=2, mini_batch_size=4, num_epochs=2), world_size)
    mini_batches = plan.mini_batches(11, 0, seed=5) + plan.mini_batches(11, 1, seed=5)  # seed 3, in step 2
    assert len(mini_batches) == 6
    assert_steps_equal(result, train(policy, result, update_batch, mini_batches))
    assert result["sampled"] is None  # the policy that sampled is not the one that was updated


@ranks
def test_captured_tokens_are_those_of_their_last_pass(world_size, updated, update_batch, policy):
    """Ratios, clips and entropies of all rows after two epochs of mini-batches, by plain torch."""
    result, batch = updated(world_size)[1]["run"], update_batch
    plan = BatchPlan(BatchSizes(prompts_per_step=6, group_size=2, mini_batch_size=4, num_epochs=2), world_size)
    first, last = plan.mini_batches(11, 0, seed=5), plan.mini_batches(11, 1, seed=5)
    expected = {}
    for number, rows in enumerate(last):
        train(policy, result, batch, [*first, *last[:number]])
        for row in rows:
            positions, logits, tokens = trained_tokens(policy, batch, row)
            logprobs = logits.detach().log_softmax(dim=-1)
            new, old = logprobs[range(len(tokens)), tokens], batch.old_logprobs[row, positions]
            entropy, advantages = -(logprobs.exp() * logprobs).sum(dim=-1), batch.advantages[row, positions]
            high = (advantages > 0) & (new > old + math.log(1.2))
            low = (advantages < 0) & (new < old + math.log(0.8))
            expected[row] = {"log_ratio": new - old, "logprobs": old, "entropy": entropy, "advantages": advantages}
            expected[row]["ref_log_ratio"] = old - batch.ref_logprobs[row, positions]
            expected[row]["clipped"] = high.float() - low.float()
    columns, start = result["columns"], 0
    assert [row[0] for row in result["token_rows"]] == [*range(11)]
    for row, _, prompt_tokens, num_tokens in result["token_rows"]:
        real = batch.input_ids[row, : batch.lengths[row]]
        assert columns["token_ids"][start : start + num_tokens] == real[prompt_tokens:].tolist()
        has_reward = row != 8
        assert columns["flags"][start : start + num_tokens] == [3 if has_reward else 1] * num_tokens
        for name, values in expected[row].items():
            found = torch.tensor(columns[name][start : start + num_tokens])
            assert has_reward or (name == "clipped") or found.isnan().all()
            if has_reward:
                torch.testing.assert_close(found.float(), values.float(), rtol=0, atol=3e-5)
        start += num_tokens
    assert {-1, 0, 1} == set(columns["clipped"])


@ranks
@pytest.mark.parametrize("name", ["stopped", "skipped"])
def test_non_finite_update_changes_nothing(name, world_size, updated):
    result = updated(world_size)[1]["nonfinite"][name]
    assert all(torch.equal(result["after"][key], tensor) for key, tensor in result["before"].items())
    if name == "stopped":
        assert result["metrics"] == "loss nan, policy/grad_norm nan"
    else:
        assert result["metrics"] == {"policy/skipped_updates": 1}


@ranks
def test_only_the_bad_mini_batch_is_skipped(world_size, updated, update_batch, policy):
    thirds = [range(4), range(4, 7), range(7, 11)]
    results = updated(world_size)[1]["nonfinite"]
    assert results["one skipped"]["metrics"]["policy/skipped_updates"] == 1
    assert_steps_equal(
        results["one skipped"], train(policy, results["one skipped"], update_batch, [thirds[0], thirds[2]])
    )
    stopped = results["stopped later"]
    assert stopped["metrics"] == "loss nan, policy/grad_norm nan"
    *_, weights = train(policy, stopped, update_batch, thirds[:1])
    for name, tensor in weights.items():
        torch.testing.assert_close(stopped["after"][name], tensor.detach(), rtol=0, atol=2e-5)


@ranks
def test_it_does_not_matter_who_has_the_rows(world_size, updated, update_batch):
    """A rank without rows computes those of others, and gets none of what they are told."""
    metrics, counts = updated(world_size)[1]["one home"]
    assert metrics == updated(world_size)[1]["token/3"]["metrics"]
    assert counts == [0] * (world_size - 1) + [int(update_batch.attention_mask.sum())]


def test_denominators_count_what_trains(update_batch):
    lengths = [12, 14, 9, 11, 8, 3, 2, 1, 0, 0, 4]
    batch = update_batch.replace(group_index=torch.arange(11))
    alone = SimpleNamespace(global_rank=0, gather_arrays=lambda array: array)
    rows = StepRows(batch.flat(), alone)
    assert rows.denominators(range(11)) == Denominators(sum(lengths), 9)
    assert rows.denominators([10, 8, 3]) == Denominators(15, 2)
    assert rows.denominators([8, 9]) == Denominators(0, 0)


@pytest.mark.nightly
def test_both_world_sizes_agree(updated):
    one, two = updated(1)[1], updated(2)[1]
    for name in ("on_policy", "run"):
        for key, tensor in one[name]["after"].items():
            torch.testing.assert_close(tensor, two[name]["after"][key], rtol=0, atol=1e-5)
        assert math.isclose(one[name]["metrics"]["loss"], two[name]["metrics"]["loss"], abs_tol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_first_optimizer_step_may_use_what_activations_have_left():
    """torch does not free cached blocks while a memory pool is in use: a first step ran out of memory beside 50 GiB."""
    size = 2**30
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 2 * size
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        activations = torch.empty(size * 3 // 2, dtype=torch.uint8, device="cuda")
        del activations
        with separate_memory_pool(SimpleNamespace(state={})):
            assert torch.empty(size, dtype=torch.uint8, device="cuda").nbytes == size
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
