"""The fused output layer equals plain torch on all logits, in values and gradients, and never holds all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optims_models import VOCABULARY, assert_same, optimized_results, plain_results, tiny_batch, tiny_model
from rlplug_optims import FusedLogprobs
from rlplug_optims.fused_logprobs import ChunkedLMHead
from torch.utils._python_dispatch import TorchDispatchMode

from rlplug.errors import ConfigError
from rlplug.models.lm_head import LogprobRequest, lm_head_of
from rlplug.types import SamplingParams

HIDDEN = 12


def inputs(num_rows, vocabulary, dtype=torch.float32, bias=False, seed=0):
    """Return hidden states, weight, bias and targets; logits have a standard deviation of about 3."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator) * 3 / HIDDEN**0.5
    offset = torch.randn(vocabulary, generator=generator)
    offset[vocabulary // 2 + 1 :: 3] = -torch.inf  # tokens that cannot be, such as those of a padded vocabulary
    targets = torch.randint(vocabulary // 2, (num_rows,), generator=generator)
    leaves = [leaf.to(dtype).requires_grad_() for leaf in ([hidden, weight, offset] if bias else [hidden, weight])]
    return [*leaves, *[None] * (3 - len(leaves))], targets


def plain_logprobs(hidden, weight, bias, targets, sampling, entropy_mode):
    """Return logprobs, entropies and sampled logprobs in float64: torch.distributions and a loop over rows."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    distribution = torch.distributions.Categorical(logits=logits / (sampling.temperature or 1.0))
    logprobs, entropies = distribution.log_prob(targets), distribution.entropy()
    sampled = []
    for probabilities, target in zip(distribution.probs.detach(), targets.tolist(), strict=True):
        order = probabilities.argsort(descending=True)
        kept = order[: sampling.top_k or len(order)]
        left = probabilities[kept] / probabilities[kept].sum()
        kept = set(kept[left.cumsum(0) - left < sampling.top_p].tolist()) | {target}
        sampled.append((probabilities[target] / sum(probabilities[token] for token in kept)).log())
    return logprobs, entropies if entropy_mode != "none" else torch.zeros_like(entropies), torch.stack(sampled)


def gradients_of(logprobs, entropies, entropy_mode, leaves):
    places = torch.arange(len(logprobs), dtype=torch.float32)
    loss = (logprobs * (places + 1).cos()).sum()
    if entropy_mode == "gradient":
        loss = loss + (entropies * (places + 2).sin()).sum()
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


def assert_equals_plain(
    layer, num_rows, vocabulary, sampling, entropy_mode, bias=False, rtol=1e-5, dtype=torch.float32
):
    """Compare with the oracle, to ``rtol`` of the largest value: entropies and gradients are differences."""
    leaves, targets = inputs(num_rows, vocabulary, dtype, bias)
    result = layer(*leaves, LogprobRequest(targets, sampling, entropy_mode))
    expected = plain_logprobs(*leaves, targets, sampling, entropy_mode)
    actual = (result.tokens.logprobs, result.entropy, result.tokens.sampled_logprobs)
    scale = max(1.0, float(expected[0].detach().abs().max()))
    for values, reference in zip(actual, expected, strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), reference, rtol=rtol, atol=rtol * scale)
    found = gradients_of(result.tokens.logprobs, result.entropy, entropy_mode, leaves)
    wanted = gradients_of(*expected[:2], entropy_mode, leaves)
    for gradient, reference in zip(found, wanted, strict=True):
        assert gradient.dtype == dtype
        scale = float(reference.abs().max())
        torch.testing.assert_close(gradient, reference, rtol=rtol, atol=rtol * scale, check_dtype=False)


@settings(max_examples=60)
@given(
    num_rows=st.sampled_from([1, 2, 7, 8, 9, 16, 20]),
    vocabulary=st.sampled_from([2, 31, 100]),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    entropy_mode=st.sampled_from(["none", "value", "gradient"]),
    bias=st.booleans(),
    recomputes=st.booleans(),
)
def test_equals_plain_torch(num_rows, vocabulary, temperature, top_k, top_p, entropy_mode, bias, recomputes):
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    head = ChunkedLMHead(8, False, recomputes)
    assert_equals_plain(head, num_rows, vocabulary, sampling, entropy_mode, bias)


@pytest.mark.parametrize("recomputes", [True, False])
def test_compiled_for_one_size_whatever_comes(recomputes):
    """Two functions are compiled once: later batches have other numbers of rows, and a rest to fill up."""
    torch._dynamo.reset()
    layer = ChunkedLMHead(8, True, recomputes)
    sampling = SamplingParams(temperature=0.7, top_k=9)
    assert_equals_plain(layer, 20, 100, sampling, "gradient", bias=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_rows in (1, 3, 8, 9, 30):
            assert_equals_plain(layer, num_rows, 100, sampling, "gradient", bias=True)


def test_bfloat16_logits_are_rounded_and_nothing_else():
    """bfloat16 logits are off by 2^-9 of their size (here up to 10); float32 from there on."""
    assert_equals_plain(
        ChunkedLMHead(8, is_compiled=False), 20, 100, SamplingParams(temperature=0.7), "gradient", True, 0.02,
        torch.bfloat16,
    )  # fmt: skip
    leaves, targets = inputs(20, 100, torch.bfloat16)
    logits = torch.nn.functional.linear(leaves[0], leaves[1]).float()
    request = LogprobRequest(targets, SamplingParams(), "gradient")
    result = ChunkedLMHead(8, is_compiled=False)(*leaves, request)
    expected = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(result.tokens.logprobs, expected, rtol=1e-5, atol=1e-5)


def test_the_weight_gradient_is_summed_in_float32():
    """512 chunks of one row: summed in bfloat16, later ones would be lost."""
    leaves, targets = inputs(512, 5, torch.bfloat16)
    request = LogprobRequest(targets, SamplingParams(), "none")
    for chunk_size in (1, 512):
        result = ChunkedLMHead(chunk_size, is_compiled=False)(*leaves, request)
        (found,) = torch.autograd.grad(result.tokens.logprobs.sum(), [leaves[1]])
        logprobs, *_ = plain_logprobs(*leaves, targets, SamplingParams(), "none")
        (expected,) = torch.autograd.grad(logprobs.sum(), [leaves[1]])
        assert float((found - expected).norm() / expected.norm()) < 2**-8


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_the_others_gradients_do_not_need_a_frozen_one(frozen):
    leaves, targets = inputs(20, 100, bias=True)
    leaves[frozen].requires_grad_(False)
    result = ChunkedLMHead(8, is_compiled=False)(*leaves, LogprobRequest(targets, SamplingParams(), "gradient"))
    expected, entropies, _ = plain_logprobs(*leaves, targets, SamplingParams(), "gradient")
    others = [leaf for leaf in leaves if leaf.requires_grad]
    found = gradients_of(result.tokens.logprobs, result.entropy, "gradient", others)
    for gradient, reference in zip(found, gradients_of(expected, entropies, "gradient", others), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("entropy_mode", ["none", "value"])
def test_entropy_without_gradient_takes_none(entropy_mode):
    leaves, targets = inputs(9, 100)
    result = ChunkedLMHead(8, is_compiled=False)(*leaves, LogprobRequest(targets, SamplingParams(), entropy_mode))
    assert not result.entropy.requires_grad
    assert not result.tokens.sampled_logprobs.requires_grad
    assert bool(result.entropy.any()) == (entropy_mode == "value")


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.num_elements = max(self.num_elements, value.untyped_storage().nbytes() // value.itemsize)
        return result


def largest_of(layer, leaves, request):
    with Largest() as mode:
        result = layer(*leaves, request)
        (result.tokens.logprobs.sum() + result.entropy.sum()).backward()
    return mode.num_elements


def test_no_tensor_has_the_size_of_all_logits():
    num_rows, vocabulary = 64, 500
    leaves, targets = inputs(num_rows, vocabulary)
    request = LogprobRequest(targets, SamplingParams(temperature=0.7, top_k=9, top_p=0.8), "gradient")

    def plain(hidden, weight, bias, request):
        return lm_head_of(torch.nn.Identity()).from_logits(torch.nn.functional.linear(hidden, weight), request)

    assert largest_of(plain, leaves, request) == num_rows * vocabulary
    assert largest_of(ChunkedLMHead(8, is_compiled=False), leaves, request) <= max(8, HIDDEN) * vocabulary


class Products(TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += "mm" in function.overloadpacket.__name__
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recomputes", [True, False])
def test_logits_are_computed_again_unless_they_are_kept(recomputes):
    leaves, targets = inputs(20, 100)
    request = LogprobRequest(targets, SamplingParams(), "none")
    with Products() as products:
        ChunkedLMHead(8, False, recomputes)(*leaves, request).tokens.logprobs.sum().backward()
    assert products.num == 3 * (4 if recomputes else 3)  # of three chunks: logits, and gradients of both factors
    with Largest() as largest, torch.no_grad():
        ChunkedLMHead(8, False, recomputes)(*leaves, request)
    assert largest.num_elements <= max(8, HIDDEN) * 100, "a pass without gradients keeps nothing"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("compile", [False, True])
def test_a_model_gives_the_same_loss_and_gradients(family, compile):
    model = tiny_model(family)
    FusedLogprobs(chunk_size=8, compile=compile).before_shard(model)
    assert_same(optimized_results(model, tiny_batch()), plain_results(tiny_model(family, packed=False), tiny_batch()))


def test_effects_say_what_was_set(monkeypatch):
    model = tiny_model()
    fused = FusedLogprobs(chunk_size=5)
    assert fused.effects() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fused.before_shard(model)
    assert [effect.description for effect in fused.effects()] == [
        "output layer fused with logprobs, 5 tokens at a time, not compiled"
    ]
    lm_head_of(model).fused = None
    assert fused.effects() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fused.before_shard(model)
    assert fused.effects()[0].description.endswith(", compiled")


def test_a_chunk_has_tokens():
    with pytest.raises(ConfigError, match="chunk_size is 0"):
        FusedLogprobs(chunk_size=0)
    assert VOCABULARY > 20  # top-k of the models' tests cuts something
