"""Checks of sampling: seeds, logprobs of the sampled distribution, and the distribution of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy
import pytest

from rlplug.types import Completion, Request, SamplingParams
from rlplug_devkit.claims import applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import GREEDY, Bench, Variant, num_equal
from rlplug_devkit.engines.deviations import deviations
from rlplug_devkit.reference import chi_square, sampled_distribution

SAMPLINGS = [
    SamplingParams(12),
    SamplingParams(12, temperature=0.7),
    SamplingParams(12, temperature=1.5),
    SamplingParams(12, temperature=0.3),
    SamplingParams(12, temperature=2.0),  # the most that servers of OpenAI's API take
    SamplingParams(12, top_p=0.8),
    SamplingParams(12, top_p=0.95),
    SamplingParams(12, top_k=5),
    SamplingParams(12, top_k=30),
    SamplingParams(12, top_k=1),
    SamplingParams(12, top_k=1_000_000),  # more than there are tokens
    SamplingParams(12, top_p=0.01),
    SamplingParams(12, temperature=0.7, top_p=0.8, top_k=9),
    SamplingParams(12, temperature=0.0),
]

NUM_LATE = 96
"""Tokens of the completions that are followed to their end."""
MOST_DEVIATION = 5.5
"""Standard deviations that a sum of a correct engine exceeds once in 26 million."""
NUM_SEEDS = 200
"""Seeds of one prompt, most of which must give a text of their own."""


def name_of(sampling: SamplingParams) -> str:
    return f"temperature={sampling.temperature},top_p={sampling.top_p},top_k={sampling.top_k}"


class DistributionChecks(EngineChecks):
    """Checks of sampled tokens and their logprobs."""

    def test_greedy_is_the_likeliest_token(self, bench: Bench) -> None:
        bench.holding()
        requests = bench.requests("greedy", [1, 8, 120, 2, 40], num_samples=2)
        completions = bench.generate(requests, GREEDY)
        num_same = num_equal(completions[::2], completions[1::2], first=None if self.seed_is_exact else 1)
        assert num_same >= (0.8 if self.seed_is_exact else 0.5) * len(completions[::2]), (
            f"{num_same} of {len(completions) // 2} prompts gave the same greedy completion with two seeds: "
            "temperature=0 means the likeliest token, without a draw."
        )
        bench.assert_greedy(requests, completions, "Look at the order of answers, at what is read, at the weights.")

    def test_greedy_stays_the_likeliest_token(self, bench: Bench) -> None:
        """Positions, caches and penalties show late in a completion."""
        bench.holding()
        requests = bench.requests("stays greedy", [2, 3, 5, 9, 17, 33, 65, 90], num_samples=1)
        completions = bench.generate(requests, SamplingParams(120, temperature=0.0))
        advice = "Earlier tokens were right: look at positions, at the KV cache, and at penalties for repeated tokens."
        bench.assert_greedy(requests, completions, advice)

    @applies_to("logprobs")
    @pytest.mark.parametrize("sampling", SAMPLINGS, ids=name_of)
    def test_logprobs_are_of_the_sampled_distribution(self, bench: Bench, sampling: SamplingParams) -> None:
        bench.holding()
        requests = bench.requests(name_of(sampling), [1, 3, 12, 150], num_samples=4)
        bench.assert_logprobs(
            requests,
            bench.generate(requests, sampling),
            sampling,
            "Return the logprob of each token after temperature, top-k and top-p, renormalised over what these keep; "
            "for greedy, the untempered one. Look it up by token id: the first is not always the sampled one.",
        )

    @applies_to("logprobs", is_claimed=False)
    def test_logprobs_that_are_not_claimed_are_nan(self, bench: Bench) -> None:
        bench.holding()
        completions = bench.generate(bench.requests("nan", [4]), GREEDY)
        assert all(math.isnan(logprob) for c in completions for logprob in c.logprobs), (
            "an engine without the capability 'logprobs' must return NaN for each token, not a made-up number."
        )

    @pytest.mark.parametrize(
        "sampling",
        [SamplingParams(1), SamplingParams(1, temperature=0.5), SamplingParams(1, temperature=1.5, top_p=0.7, top_k=9)],
        ids=name_of,
    )
    def test_tokens_follow_the_distribution(self, bench: Bench, sampling: SamplingParams) -> None:
        """Chi-square of first tokens, with fixed seeds, is below a bound that a correct engine exceeds once in 1e6."""
        bench.holding()
        requests = bench.requests(f"draws/{name_of(sampling)}", [6], self.num_draws)
        expected = sampled_distribution(bench.policy().logits(requests[0].prompt_ids)[0], sampling)
        drawn = [int(completion.token_ids[0]) for completion in bench.generate(requests, sampling)]
        counts = numpy.bincount(drawn, minlength=len(expected)).astype(float)
        share_outside = counts[expected == 0].sum() / counts.sum()
        assert share_outside <= self.tolerances.outside, (
            f"{share_outside:.1%} of the tokens are ones that top-k and top-p exclude: apply top-k first, then top-p "
            "to the remaining tokens."
        )
        statistic, bound = chi_square(counts, expected)
        assert statistic < bound, (
            f"chi-square of {self.num_draws} tokens against the reference is {statistic:.0f}, above {bound:.0f}: the "
            "engine draws from another distribution than sampling asks for. Look at temperature, top_p and top_k, at "
            "defaults taken from generation_config.json, and at how seeds become random numbers."
        )

    @pytest.mark.parametrize("weights", ["first", "endless"])
    def test_tokens_follow_the_distribution_to_the_end(self, bench: Bench, weights: Variant) -> None:
        """Sums over all tokens of long completions, each with mean 0 and known variance under the reference."""
        bench.holding(weights)
        sampling = SamplingParams(NUM_LATE)
        requests = bench.requests(f"to the end/{weights}", [4, 7, 11, 30], num_samples=max(4, self.num_draws // 100))
        completions = bench.generate(requests, sampling)
        if bench.capabilities.logprobs:
            advice = "Earlier tokens have the right logprobs: look at caches, positions, and penalties."
            bench.assert_logprobs(requests, completions, sampling, advice)
        for name, score in deviations(bench.held_policy, requests, completions).items():
            assert abs(score) < MOST_DEVIATION, (
                f"{name}: {score:+.1f} standard deviations from what the reference expects, and a correct engine is "
                f"within {MOST_DEVIATION}. Look for penalties and limits that generation_config.json sets, and for "
                "random numbers that are used twice."
            )

    def test_completions_differ_by_seed(self, bench: Bench) -> None:
        bench.holding()
        (request,) = bench.requests("by seed", [5])
        seeds = {"any seeds": [r.seed for r in bench.requests("by seed", [5], NUM_SEEDS)]}
        seeds["seeds that follow each other"] = [request.seed + index for index in range(NUM_SEEDS)]
        for name, chosen in seeds.items():
            twins = [replace(request, request_id=f"{name}/{seed}", seed=seed) for seed in chosen]
            completions = bench.generate(twins, SamplingParams(12))
            num_distinct = len({tuple(c.token_ids.tolist()) for c in completions})
            assert num_distinct > 0.75 * NUM_SEEDS, (
                f"{NUM_SEEDS} completions of one prompt with {name} have {num_distinct} different texts: give each its "
                "own request.seed, all of it."
            )

    def test_equal_seeds_repeat(self, bench: Bench) -> None:
        bench.holding()
        sampling = SamplingParams(16)
        (request,) = bench.requests("repeats", [5])
        for seed in (2**63 - 1, 0, request.seed):  # a run's seeds have 63 bits, and 0 is one
            twins = [Request(name, request.prompt_ids, seed) for name in ("one", "two")]
            first, again = bench.generate(twins, sampling), bench.generate(twins[::-1], sampling)
            self.assert_same_tokens(first, [first[1], first[0]], f"one batch, with the seed {seed}")
            self.assert_same_tokens(first, again, f"two calls, with the seed {seed}")
        requests = bench.requests("repeats", [5, 9], num_samples=8)  # one alone may end with its first token
        first = bench.generate(requests, sampling)
        bench.sync()
        again = bench.generate(requests, sampling)
        self.assert_same_tokens(first, again, "two calls with a sync of the same weights between")
        renamed = [replace(request, request_id=f"renamed {index}") for index, request in enumerate(requests)]
        self.assert_same_tokens(first, bench.generate(renamed, sampling), "two calls with other request ids")

    def test_seed_decides_whatever_else_is_in_the_batch(self, bench: Bench) -> None:
        bench.holding()
        sampling, requests = SamplingParams(10), bench.requests("batch", [3, 1, 60, 12], num_samples=3)
        together = bench.generate(requests, sampling)
        self.assert_same_tokens(together, bench.generate(requests[::-1], sampling)[::-1], "the reverse order")
        self.assert_same_tokens(
            together, [bench.generate([request], sampling)[0] for request in requests], "one request at a time"
        )

    def assert_same_tokens(self, expected: Sequence[Completion], other: Sequence[Completion], where: str) -> None:
        """Fail unless all tokens repeat or, if ``seed_is_exact`` is false, nine in ten of the first tokens."""
        if self.seed_is_exact:
            num_same, needed = num_equal(expected, other), len(expected)
        else:
            num_same, needed = num_equal(expected, other, first=1), math.ceil(0.9 * len(expected))
        assert num_same >= needed, (
            f"{num_same} of {len(expected)} requests with the same prompt and seed gave the same tokens in {where}: "
            "draw each request from a generator of its own seed. If batches differ by round-off alone, because kernels "
            "are not batch-invariant, set seed_is_exact = False."
        )
