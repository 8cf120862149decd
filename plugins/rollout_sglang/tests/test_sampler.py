"""Draws by seed, against the reference of the conformance kit; the functions run on any device."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy
import pytest
import torch
from rlplug_devkit.reference import chi_square, sampled_distribution
from rlplug_rollout_sglang.sampler import BLOCK, draw, truncated, uniform
from torch import Tensor

from rlplug.types import SamplingParams

TOP_K_ALL = 1 << 30
"""What SGLang makes of top_k=-1."""
VOCABULARY = 3 * BLOCK + 17


def drawn(
    logits: Tensor, sampling: SamplingParams, seeds: Tensor, positions: Tensor, min_ps: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw as SGLang asks: it knows greedy as temperature 1 and top_k 1."""
    rows = logits.shape[0]
    greedy = sampling.is_greedy
    return draw(
        logits,
        torch.full((rows,), 1.0 if greedy else sampling.temperature),
        torch.full((rows,), 1 if greedy else sampling.top_k or TOP_K_ALL, dtype=torch.int32),
        torch.full((rows,), sampling.top_p),
        seeds,
        positions,
        truncates=sampling.is_truncated,
        all_greedy=greedy,
        min_ps=min_ps,
    )


def some_logits(rows: int, vocabulary: int = VOCABULARY) -> Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows))


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(temperature=1.5, top_p=0.7, top_k=9),
    SamplingParams(temperature=0.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_logprobs_are_of_what_is_drawn_from(sampling: SamplingParams) -> None:
    logits = some_logits(40)
    token_ids, logprobs = drawn(logits.clone(), sampling, torch.arange(40), torch.arange(40))
    expected = sampled_distribution(logits.double().numpy(), sampling)
    chosen = expected[numpy.arange(40), token_ids.numpy()]
    assert (chosen > 0).all(), "a token was drawn that top-k and top-p exclude"
    numpy.testing.assert_allclose(logprobs.numpy(), numpy.log(chosen), atol=2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", SAMPLINGS[:-1], ids=str)
def test_draws_follow_the_distribution(sampling: SamplingParams) -> None:
    """With seeds that are always the same; a right sampler exceeds the bound once in 1e6."""
    num_draws, logits = 20_000, some_logits(1, vocabulary=600)
    seeds = torch.arange(num_draws) * 7919 + 13
    token_ids, _ = drawn(logits.expand(num_draws, -1), sampling, seeds, torch.full((num_draws,), 6))
    counts = numpy.bincount(token_ids.numpy(), minlength=600).astype(float)
    statistic, bound = chi_square(counts, sampled_distribution(logits.double().numpy(), sampling)[0])
    assert statistic < bound


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.7), SamplingParams(temperature=1.5, top_p=0.9, top_k=30)], ids=str
)
def test_min_p_excludes_by_the_likeliest_token_that_is_left(sampling: SamplingParams) -> None:
    """Alone catches a min_p that is ignored, or is not in the logprobs; rows without it draw as before."""
    logits, min_ps = (some_logits(1, 40) / 3).expand(4000, -1), torch.tensor([0.2, 0.0]).repeat(2000)
    seeds = torch.arange(4000)
    token_ids, logprobs = drawn(logits, sampling, seeds, seeds, min_ps)
    without = drawn(logits, sampling, seeds, seeds)
    assert all(
        torch.equal(found[1::2], before[1::2]) for found, before in zip((token_ids, logprobs), without, strict=True)
    )
    (expected,) = sampled_distribution(logits[:1].double().numpy(), sampling)
    expected = numpy.where(expected < 0.2 * expected.max(), 0, expected)
    expected /= expected.sum()
    kept = expected > 0
    assert 1 < kept.sum() < (sampled_distribution(logits[:1].double().numpy(), sampling) > 0).sum()
    statistic, bound = chi_square(numpy.bincount(token_ids[::2].numpy(), minlength=40)[kept], expected[kept])
    assert statistic < bound
    numpy.testing.assert_allclose(logprobs[::2].numpy(), numpy.log(expected[token_ids[::2].numpy()]), atol=1e-4)


def test_greedy_rows_stay_greedy_beside_others() -> None:
    logits = some_logits(4)
    top_ks = torch.tensor([1, TOP_K_ALL, 3, 1], dtype=torch.int32)
    token_ids, logprobs = draw(
        logits, torch.ones(4), top_ks, torch.tensor([1.0, 1.0, 0.5, 1.0]), torch.arange(4), torch.arange(4)
    )
    untempered = torch.log_softmax(logits.double(), dim=-1)
    for row in (0, 3):
        assert token_ids[row] == logits[row].argmax()
        assert logprobs[row] == pytest.approx(float(untempered[row].max()), abs=1e-5)
    assert logprobs[1] == pytest.approx(float(untempered[1, token_ids[1]]), abs=1e-5)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """So neither the batch nor the order of its rows matters."""
    logits, seeds, positions = some_logits(32), torch.arange(32) // 4, torch.arange(32) % 4
    together, _ = drawn(logits, SamplingParams(), seeds, positions)
    backwards, _ = drawn(logits.flip(0), SamplingParams(), seeds.flip(0), positions.flip(0))
    assert together.tolist() == backwards.flip(0).tolist()
    alone = [drawn(logits[[i]], SamplingParams(), seeds[[i]], positions[[i]])[0].item() for i in range(32)]
    assert together.tolist() == alone


def test_seeds_and_positions_give_independent_numbers() -> None:
    grid = uniform(torch.arange(200).repeat_interleave(200), torch.arange(200).repeat(200)).view(200, 200).numpy()
    assert 0 <= grid.min() < grid.max() < 1
    assert abs(grid.mean() - 0.5) < 6 / math.sqrt(12 * grid.size)
    for shifted in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1]):
        assert abs(shifted.mean() - 0.25) < 0.01
    counts = numpy.bincount((grid * 100).astype(int).ravel(), minlength=100).astype(float)
    statistic, bound = chi_square(counts, numpy.full(100, 0.01))
    assert statistic < bound
    far = uniform(torch.tensor([0, (1 << 63) - 1, 1 << 62]), torch.tensor([0, 0, 0]))
    assert len(set(far.tolist())) == 3


def test_numbers_are_those_of_splitmix64() -> None:
    """Against Python's integers, which do not wrap around."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed, position in [(0, 0), (5, 17), ((1 << 63) - 1, 4095)]:
        expected = mixed((mixed((seed + golden) & mask) + position * golden) & mask) >> 16
        assert uniform(torch.tensor([seed]), torch.tensor([position])).item() == expected / 2**48


def test_shares_at_the_ends_find_tokens_that_can_be() -> None:
    """Most of the probability is in a few tokens of different blocks, and the first and last tokens have none."""
    probabilities = torch.zeros(1, VOCABULARY)
    probabilities[0, [3, BLOCK, BLOCK + 1, 2 * BLOCK - 1]] = 0.25
    logits = probabilities.log().expand(5000, -1)
    token_ids, _ = drawn(logits, SamplingParams(), torch.arange(5000), torch.zeros(5000, dtype=torch.int64))
    assert set(token_ids.tolist()) == {3, BLOCK, BLOCK + 1, 2 * BLOCK - 1}


def test_top_p_of_one_keeps_all_tokens() -> None:
    probabilities = torch.softmax(some_logits(8, 50_000), dim=-1)
    kept = truncated(probabilities, torch.full((8,), TOP_K_ALL, dtype=torch.int32), torch.ones(8))
    torch.testing.assert_close(kept, probabilities, atol=1e-7, rtol=1e-4)
    assert (kept > 0).all()


def test_nan_is_no_index_of_nothing() -> None:
    token_ids, _ = drawn(torch.full((2, 700), math.nan), SamplingParams(), torch.arange(2), torch.arange(2))
    assert all(0 <= token < 700 for token in token_ids.tolist())


def test_sglang_of_others_is_left_alone() -> None:
    """The entry point is called in every process of SGLang in this environment; without the flag it imports nothing."""
    code = "import sys; import rlplug_rollout_sglang.sampler as s; s.register(); print('lightning' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "RLPLUG_SGLANG_SAMPLER"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "the sampler must not load the trainer"
