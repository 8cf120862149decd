"""Logprobs and entropy against float64 NumPy, truncation against transformers' own warpers."""

from __future__ import annotations

import numpy
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlplug.ops import entropy, scaled_logits, token_logprobs, truncate_logits
from rlplug.types import SamplingParams


def random_logits(*shape, spread=3.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def numpy_log_softmax(logits):
    logits = logits.double().numpy()
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - numpy.log(numpy.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("spread", [0.1, 3.0, 50.0])
def test_token_logprobs(spread):
    logits = random_logits(3, 5, 101, spread=spread)
    tokens = torch.randint(0, 101, (3, 5), generator=torch.Generator().manual_seed(1))
    expected = numpy.take_along_axis(numpy_log_softmax(logits), tokens.numpy()[..., None], axis=-1)[..., 0]
    numpy.testing.assert_allclose(token_logprobs(logits, tokens).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [0.1, 3.0, 50.0])
def test_entropy(spread):
    logits = random_logits(3, 5, 101, spread=spread)
    logp = numpy_log_softmax(logits)
    expected = -(numpy.exp(logp) * logp).sum(axis=-1)
    # float32 carries the logits, which reach three times the spread, to 1e-7 of their size
    numpy.testing.assert_allclose(entropy(logits).numpy(), expected, rtol=1e-5, atol=1e-6 + 1e-6 * spread)


def test_entropy_of_known_distributions():
    assert entropy(torch.zeros(8)).item() == pytest.approx(numpy.log(8), abs=1e-6)
    assert entropy(torch.tensor([1000.0, 0.0, 0.0])).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_logits(dtype):
    logits = random_logits(2, 7).to(dtype)
    for temperature, divisor in ((1.0, 1.0), (0.0, 1.0), (0.7, 0.7), (2.0, 2.0)):
        scaled = scaled_logits(logits, temperature)
        assert scaled.dtype == torch.float32
        torch.testing.assert_close(scaled.double(), logits.double() / divisor, rtol=1e-6, atol=0)


def warped(logits, top_k, top_p):
    """What transformers samples from: top-k first, then top-p."""
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    return TopPLogitsWarper(top_p)(None, logits) if top_p < 1 else logits


@pytest.mark.parametrize("top_k", [0, 1, 2, 5, 50, 101, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.8, 0.5, 1e-6])
def test_truncation_is_that_of_transformers(top_k, top_p):
    logits = random_logits(200, 101, seed=top_k)
    torch.testing.assert_close(
        truncate_logits(logits, SamplingParams(top_k=top_k, top_p=top_p)), warped(logits, top_k, top_p), rtol=0, atol=0
    )


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = random_logits(500, 40)
    probabilities = numpy.exp(numpy_log_softmax(logits))
    kept = truncate_logits(logits, SamplingParams(top_p=0.8)).isfinite().numpy()
    for row, mask in zip(probabilities, kept, strict=True):
        inside = numpy.sort(row[mask])
        assert inside.sum() >= 0.8 - 1e-6
        assert inside[1:].sum() < 0.8 + 1e-6  # without its least likely token the set falls short
        assert row[~mask].max(initial=0.0) <= inside[0]


def test_equal_logits_at_the_edge_of_top_k_all_stay():
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    kept = truncate_logits(logits, SamplingParams(top_k=2))
    assert kept.isfinite().tolist() == [[True, True, True, True, False]]
    torch.testing.assert_close(kept, warped(logits, top_k=2, top_p=1.0))


def test_without_truncation_nothing_changes():
    logits = random_logits(4, 9)
    assert truncate_logits(logits, SamplingParams(temperature=0.5)) is logits


def test_kept_token_stays_and_counts():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    kept = truncate_logits(logits, SamplingParams(top_k=2), keep=torch.tensor([0, 3]))
    assert kept.isfinite().tolist() == [[True, False, True, True], [False, False, True, True]]
    logprobs = token_logprobs(kept, torch.tensor([0, 3]))
    expected = [-numpy.log(1 + numpy.exp(2) + numpy.exp(3)), -numpy.log(1 + numpy.exp(-1))]
    numpy.testing.assert_allclose(logprobs.numpy(), expected, rtol=1e-6)
