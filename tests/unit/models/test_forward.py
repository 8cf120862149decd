"""Forward passes over packed rows, against plain transformers on each row alone."""

from __future__ import annotations

import pytest
import torch

from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack
from rlplug.types import SamplingParams

FAMILIES = ["llama", "llama_tied", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "gpt2"]
"""Windows of mistral, gemma2 and gemma3 are shorter than the longest row; gemma2 has a soft cap in attention."""
RAGGED = [(2, 5), (6, 1), (4, 0), (3, 9), (1, 3), (1, 0)]
ROUND_OFF = 1e-4
"""Of a logprob in float32. Which order a product sums in depends on its shape and on the processor: 1.5e-5 was seen."""


def reference(model, batch, temperature):
    """Logprobs and entropy, [K], from one unpadded forward pass per row, with plain log_softmax."""
    model.set_attn_implementation("eager")
    rows = []
    for ids, length in zip(batch.input_ids, batch.lengths, strict=True):
        logp = (model(ids[None, :length]).logits[0, :-1].float() / temperature).log_softmax(dim=-1)
        chosen = logp[range(length - 1), ids[1:length]]
        entropy = -(logp.exp() * logp).sum(dim=-1)
        pad = (1, batch.input_ids.shape[1] - length)
        rows.append([torch.nn.functional.pad(values, pad) for values in (chosen, entropy)])
    model.set_attn_implementation("packed")
    return (batch.trained(torch.stack(column)) for column in zip(*rows, strict=True))


def gradients_of(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_equals_that_of_each_row_alone(family, temperature, model_folder, load_policy, make_batch):
    policy, batch = load_policy(model_folder(family)).train(), make_batch(RAGGED, seed=1)
    weights = torch.randn(int(batch.response_mask.sum()), generator=torch.Generator().manual_seed(7))
    expected, expected_entropy = reference(policy, batch, temperature)
    output = policy_forward(policy, pack(batch.flat()), SamplingParams(temperature=temperature), "gradient")
    torch.testing.assert_close(output.tokens.logprobs, expected, rtol=0, atol=ROUND_OFF)
    torch.testing.assert_close(output.entropy, expected_entropy, rtol=0, atol=ROUND_OFF)
    assert torch.equal(output.tokens.sampled_logprobs, output.tokens.logprobs)
    assert not output.tokens.sampled_logprobs.requires_grad
    for ours, theirs in ((output.tokens.logprobs, expected), (output.entropy, expected_entropy)):
        gradients = gradients_of(policy, (ours * weights).sum())
        for name, gradient in gradients_of(policy, (theirs * weights).sum()).items():
            round_off = 3e-5 * gradient.abs().max().item()
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=round_off)


def sampled_logprobs(output):
    return output.tokens.sampled_logprobs


@pytest.mark.parametrize("rows", [[0], [1], [2], [3, 1], [5, 2], [0, 1, 2, 3, 4, 5]])
def test_tokens_have_their_values_however_rows_are_cut(rows, model_folder, load_policy, make_batch):
    policy, batch = load_policy(model_folder("llama")), make_batch(RAGGED)
    whole = policy_forward(policy, pack(batch.flat()), SamplingParams(top_p=0.9), "value")
    part = policy_forward(policy, pack(batch.flat().select(rows)), SamplingParams(top_p=0.9), "value")
    for tensors in (lambda output: output.tokens.logprobs, lambda output: output.entropy, sampled_logprobs):
        values = tensors(part)
        assert values.dtype == torch.float32
        expected = torch.cat([batch.grid(tensors(whole))[row][batch.response_mask[row]] for row in rows])
        torch.testing.assert_close(values, expected, rtol=0, atol=ROUND_OFF)
        assert values.ne(0).all()


def test_nothing_to_train_still_reaches_every_weight(model_folder, load_policy, make_batch):
    """Every rank must run a backward pass through all of the model, with rows that train or without."""
    policy = load_policy(model_folder("llama"))
    for lengths in ([(4, 0), (1, 0)], [(1, 0)]):
        output = policy_forward(policy, pack(make_batch(lengths).flat()), SamplingParams(), "value")
        gradients = gradients_of(policy, output.tokens.logprobs.sum())
        assert not any(gradient.any() for gradient in gradients.values())


def test_entropy_modes(model_folder, load_policy, make_batch):
    policy, batch = load_policy(model_folder("llama")), make_batch(RAGGED)
    none, value, gradient = (
        policy_forward(policy, pack(batch.flat()), SamplingParams(), m) for m in ("none", "value", "gradient")
    )
    assert not none.entropy.any()
    assert torch.equal(value.entropy, gradient.entropy)
    assert value.entropy.gt(0).all()
    assert not none.entropy.requires_grad
    assert not value.entropy.requires_grad
    assert gradient.entropy.requires_grad
    assert value.tokens.logprobs.requires_grad


def test_sampled_logprobs_are_of_the_truncated_distribution(model_folder, load_policy, make_batch):
    policy, batch = load_policy(model_folder("llama")), make_batch(RAGGED)
    sampling = SamplingParams(temperature=0.7, top_k=5)
    output = policy_forward(policy, pack(batch.flat()), sampling, "none")
    for index, (row, position) in enumerate(batch.response_mask.nonzero().tolist()):
        tokens = batch.input_ids[row].tolist()
        with torch.no_grad():
            logits = policy(torch.tensor([tokens[:position]])).logits[0, -1] / 0.7
        kept = {*logits.topk(5).indices.tolist(), tokens[position]}
        expected = logits[tokens[position]] - logits[sorted(kept)].logsumexp(dim=0)
        assert output.tokens.sampled_logprobs[index].item() == pytest.approx(expected.item(), abs=ROUND_OFF)
    assert (output.tokens.sampled_logprobs > output.tokens.logprobs).all()
