"""Faults in the distribution that an engine draws from, its seeds, and its logprobs."""

from __future__ import annotations

import dataclasses
import math
import secrets
from itertools import pairwise

import numpy
import torch
from rlplug_engines.colocated import SeededSampler

from engine_faults.faults import DrawsOthers, EditsCompletions, EditsLogits, Plain, fault
from rlplug.rollout import hf_engine
from rlplug.types import SamplingParams

DRAWN, SEEDS, SAID = "distribution of tokens", "seeds", "logprobs"
LATE = "test_tokens_follow_the_distribution_to_the_end"


def seen(generated: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return how often each token was generated, float [B, V]."""
    return torch.zeros_like(like).scatter_add(-1, generated, torch.ones_like(generated, dtype=like.dtype))


@fault(DRAWN, LATE)
class PenalizesRepetition(DrawsOthers):
    """Draws tokens of the completion less often, as ``repetition_penalty`` of a checkpoint's settings would."""

    def edit(self, generated, scores):
        return scores - 0.7 * (seen(generated, scores) > 0)


@fault(DRAWN, LATE)
class PenalizesFrequency(DrawsOthers):
    """Draws a token less often each time, a little."""

    def edit(self, generated, scores):
        return scores - 0.15 * seen(generated, scores)


@fault(DRAWN, LATE)
class NeverRepeatsAPair(DrawsOthers):
    """Draws no pair of tokens a second time, as ``no_repeat_ngram_size`` 2 does."""

    def edit(self, generated, scores):
        scores = scores.clone()
        for row, ids in enumerate(generated.tolist()):
            scores[row, [b for a, b in pairwise(ids) if a == ids[-1]]] -= 20.0
        return scores


@fault(DRAWN, LATE)
class CoolsDownLate(DrawsOthers):
    """Draws from the 24th token on with a lower temperature."""

    def edit(self, generated, scores):
        return scores if generated.shape[1] < 24 else scores * 1.25


@fault(DRAWN, LATE)
class HeatsUpLate(DrawsOthers):
    """Draws from the 48th token on with a higher temperature."""

    def edit(self, generated, scores):
        return scores if generated.shape[1] < 48 else scores * 0.7


@fault(DRAWN, None)
class CoolsDownAfter150Tokens(DrawsOthers):
    """Draws from the 150th token on with a lower temperature."""

    def edit(self, generated, scores):
        return scores if generated.shape[1] < 150 else scores * 1.25


@fault(DRAWN, "test_every_end_token_ends_and_is_included")
class EndsLate(DrawsOthers):
    """Draws no end token among the first 12, as ``min_new_tokens`` would."""

    def edit(self, generated, scores):
        if generated.shape[1] < 12:
            scores = scores.clone()
            scores[:, list(self._policy.eos_token_ids)] = -math.inf
        return scores


@fault(DRAWN, LATE)
class WantsToEnd(DrawsOthers):
    """Draws end tokens more often the longer a completion is."""

    def edit(self, generated, scores):
        scores = scores.clone()
        scores[:, list(self._policy.eos_token_ids)] += 0.08 * generated.shape[1]
        return scores


@fault(DRAWN, "test_every_end_token_ends_and_is_included")
class DrawsOneNumberForAll(Plain):
    """Draws all tokens of a completion with the same random number."""

    def _generate_batch(self, requests, sampling, num_new, counted):
        hf_engine.SeededSampler = ConstantSampler
        try:
            return super()._generate_batch(requests, sampling, num_new, counted)
        finally:
            hf_engine.SeededSampler = SeededSampler


class ConstantSampler(SeededSampler):
    """Gives all steps the first number."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._uniforms = self._uniforms[:, :1].expand_as(self._uniforms)


@fault(DRAWN, "test_tokens_follow_the_distribution")
class NeverDrawsTheUnlikely(DrawsOthers):
    """Draws no token of a probability below 0.5%, as ``min_p`` would."""

    def edit(self, generated, scores):
        return scores.masked_fill(scores.softmax(-1) < 0.005, -math.inf)


@fault(DRAWN, LATE)
class DrawsTheTokenizersIdsAlone(DrawsOthers):
    """Draws no id that the tokenizer lacks, though the model embeds it."""

    def edit(self, generated, scores):
        scores = scores.clone()
        scores[:, 59:] = -math.inf
        return scores


@fault(DRAWN, "test_logprobs_are_of_the_sampled_distribution")
class HasALeastTemperature(Plain):
    """Takes temperatures below 0.6 as 0.6."""

    def generate(self, requests, sampling):
        raised = max(0.6, sampling.temperature) if sampling.temperature else 0.0
        return super().generate(requests, dataclasses.replace(sampling, temperature=raised))


@fault(DRAWN, "test_logprobs_are_of_the_sampled_distribution")
class HasAGreatestTemperature(Plain):
    """Takes temperatures above 1.6 as 1.6."""

    def generate(self, requests, sampling):
        return super().generate(requests, dataclasses.replace(sampling, temperature=min(1.6, sampling.temperature)))


@fault(DRAWN, "test_logprobs_are_of_the_sampled_distribution")
class KeepsTwentyAtMost(Plain):
    """Takes a ``top_k`` above 20 as 20."""

    def generate(self, requests, sampling):
        return super().generate(requests, dataclasses.replace(sampling, top_k=min(sampling.top_k, 20)))


@fault(DRAWN, "test_logprobs_are_of_the_sampled_distribution")
class IgnoresATopPNearOne(Plain):
    """Takes a ``top_p`` above 0.9 as 1."""

    def generate(self, requests, sampling):
        return super().generate(
            requests, dataclasses.replace(sampling, top_p=1.0 if sampling.top_p > 0.9 else sampling.top_p)
        )


@fault(DRAWN, "test_logprobs_are_of_the_sampled_distribution")
class IgnoresTopKAtOne(Plain):
    """Takes a ``top_k`` of 1 as none."""

    def generate(self, requests, sampling):
        return super().generate(
            requests, dataclasses.replace(sampling, top_k=0 if sampling.top_k == 1 else sampling.top_k)
        )


@fault(DRAWN, "test_greedy_is_the_likeliest_token", "without a draw")
class DrawsALittleWhenGreedy(Plain):
    """Takes a temperature of 0 as 0.3."""

    def generate(self, requests, sampling):
        return super().generate(requests, dataclasses.replace(sampling, temperature=sampling.temperature or 0.3))


@fault(DRAWN, "test_greedy_is_the_likeliest_token")
class PenalizesWhenGreedy(EditsLogits):
    """Repeats no token when it is greedy."""

    def edit(self, generated, scores):
        return scores - 100.0 * (seen(generated, scores) > 0)


@fault(DRAWN, "test_greedy_stays_the_likeliest_token")
class DegradesLate(EditsLogits):
    """Adds noise to the logits from the 30th token on."""

    def edit(self, generated, scores):
        noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(generated.shape[1]))
        return scores if generated.shape[1] < 30 else scores + 0.5 * noise


@fault(DRAWN, "test_logprobs_are_of_the_sampled_distribution")
class NeedsATopKOfTheVocabulary(Plain):
    """Fails where top-k keeps more tokens than there are."""

    def generate(self, requests, sampling):
        assert sampling.top_k <= self._model.config.vocab_size
        return super().generate(requests, sampling)


@fault(SEEDS, "test_tokens_follow_the_distribution")
class Takes8BitsOfSeeds(Plain):
    """Drops all but eight bits of seeds."""

    def generate(self, requests, sampling):
        return super().generate([dataclasses.replace(r, seed=r.seed & 0xFF) for r in requests], sampling)


@fault(SEEDS, None)
class Takes32BitsOfSeeds(Plain):
    """Drops the upper bits of seeds, which repeats one in four thousand million."""

    def generate(self, requests, sampling):
        return super().generate([dataclasses.replace(r, seed=r.seed & 0xFFFFFFFF) for r in requests], sampling)


@fault(SEEDS, "test_completions_differ_by_seed")
class TakesTheUpperBitsOfSeeds(Plain):
    """Drops the lower bits of seeds."""

    def generate(self, requests, sampling):
        return super().generate([dataclasses.replace(r, seed=r.seed >> 20) for r in requests], sampling)


@fault(SEEDS, "test_equal_seeds_repeat")
class TakesZeroForNoSeed(Plain):
    """Draws by chance where the seed is 0."""

    def generate(self, requests, sampling):
        changed = [dataclasses.replace(r, seed=r.seed or secrets.randbits(62)) for r in requests]
        return super().generate(changed, sampling)


@fault(SEEDS, "test_a_stopped_call_answers_every_request")
class CountsItsCalls(Plain):
    """Adds the number of the call to seeds."""

    def generate(self, requests, sampling):
        self._calls = self.__dict__.get("_calls", 0) + 1
        return super().generate([dataclasses.replace(r, seed=r.seed + self._calls) for r in requests], sampling)


@fault(SEEDS, "test_equal_seeds_repeat")
class SeedsByName(Plain):
    """Adds the request's name to its seed."""

    def generate(self, requests, sampling):
        changed = [dataclasses.replace(r, seed=r.seed ^ (sum(r.request_id.encode()) << 8)) for r in requests]
        return super().generate(changed, sampling)


@fault(SEEDS, "test_seed_decides_whatever_else_is_in_the_batch")
class SeedsByPlace(Plain):
    """Adds the place in the batch to seeds."""

    def generate(self, requests, sampling):
        changed = [dataclasses.replace(r, seed=r.seed + len(requests)) for r in requests]
        return super().generate(changed, sampling)


@fault(SEEDS, "test_equal_seeds_repeat")
class SeedsByVersion(Plain):
    """Adds the version of the weights to seeds."""

    def generate(self, requests, sampling):
        changed = [dataclasses.replace(r, seed=r.seed + self._version) for r in requests]
        return super().generate(changed, sampling)


@fault(SEEDS, "test_equal_seeds_repeat")
class MixesVersionsIntoSeeds(Plain):
    """Flips bits of seeds by the version of the weights, which one request in a few does not show."""

    def generate(self, requests, sampling):
        return super().generate([dataclasses.replace(r, seed=r.seed ^ self._version) for r in requests], sampling)


@fault(SAID, "test_logprobs_are_of_the_sampled_distribution", "base 2")
class SaysBase2(EditsCompletions):
    """Returns logarithms to base 2."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, logprobs=completion.logprobs / math.log(2))


@fault(SAID, "test_logprobs_are_of_the_sampled_distribution")
class SaysProbabilities(EditsCompletions):
    """Returns minus the probability for the logprob."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, logprobs=-numpy.exp(completion.logprobs))


@fault(SAID, "test_logprobs_are_of_the_sampled_distribution", "the token before")
class SaysLogprobsOfTheTokenBefore(EditsCompletions):
    """Returns each token's logprob at the next one."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, logprobs=numpy.roll(completion.logprobs, 1))


@fault(SAID, "test_logprobs_are_of_the_sampled_distribution")
class SaysAtLeastMinusFour(EditsCompletions):
    """Returns no logprob below -4."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, logprobs=numpy.maximum(completion.logprobs, -4.0))


@fault(SAID, "test_logprobs_are_of_the_sampled_distribution")
class RoundsLogprobs(EditsCompletions):
    """Returns logprobs with two decimals."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, logprobs=numpy.round(completion.logprobs, 2))


@fault(SAID, LATE)
class ForgetsLateLogprobs(EditsCompletions):
    """Returns the mean logprob from the 20th token on."""

    def edited(self, request, completion, sampling):
        logprobs = numpy.array(completion.logprobs)
        logprobs[20:] = logprobs.mean()
        return dataclasses.replace(completion, logprobs=logprobs)


@fault(SAID, "test_greedy_stays_the_likeliest_token")
class SaysPenalizedLogprobs(EditsLogits):
    """Penalises what was generated 16 tokens before or earlier, and says the penalised logprobs."""

    def edit(self, generated, scores):
        return scores - 1.0 * (seen(generated[:, :-16], scores) > 0) if generated.shape[1] > 16 else scores


@fault(SAID, "test_logprobs_are_of_the_sampled_distribution")
class SaysGreedyZero(EditsCompletions):
    """Returns 0 for greedy tokens, which are certain."""

    def edited(self, request, completion, sampling: SamplingParams):
        return (
            dataclasses.replace(completion, logprobs=[0.0] * len(completion.token_ids))
            if sampling.is_greedy
            else completion
        )
