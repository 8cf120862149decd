"""Faults in what an engine reads, and in the form of what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy
from rlplug_devkit.models import BOS, PAD, VOCABULARY
from rlplug_engines.colocated import max_completion_tokens
from transformers import AutoTokenizer

from engine_faults.faults import EditsCompletions, EditsPrompts, Plain, fault
from rlplug.errors import RunError
from rlplug.interfaces import EngineCapabilities, EngineFault
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.turns.stop_strings import StopStrings
from rlplug.types import Completion, Request, SamplingParams

FORM, ORDER, PROMPTS, LIMITS = "form of answers", "order and number", "prompts", "limits"


@fault(ORDER, "test_results_are_in_the_order_of_requests")
class LosesTheLastCompletion(Plain):
    """Answers one request too few."""

    def generate(self, requests, sampling):
        return super().generate(requests, sampling)[: len(requests) - 1 or None]


@fault(ORDER, "test_results_are_in_the_order_of_requests")
class AnswersInReverse(Plain):
    """Returns completions in the reverse order."""

    def generate(self, requests, sampling):
        return super().generate(requests, sampling)[::-1]


@fault(ORDER, "test_results_are_in_the_order_of_requests")
class MixesManyRequests(Plain):
    """Returns completions in another order once there are more than 100 requests."""

    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        return completions if len(requests) <= 100 else [*completions[100:], *completions[:100]]


@fault(ORDER, "test_each_request_has_its_own_limit", "right for other requests")
class SwapsTextsOfTwo(Plain):
    """Gives the first two requests each other's tokens under the right ids."""

    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        if len(completions) > 1:
            one, two = completions[:2]
            completions[0] = dataclasses.replace(two, request_id=one.request_id)
            completions[1] = dataclasses.replace(one, request_id=two.request_id)
        return completions


@fault(FORM, "test_completions_are_well_formed")
class EchoesThePrompt(EditsCompletions):
    """Puts the prompt before each completion."""

    def edited(self, request, completion, sampling):
        ids = [*request.prompt_ids, *completion.token_ids]
        return dataclasses.replace(completion, token_ids=ids, logprobs=[-1.0] * len(ids))


@fault(FORM, "test_completions_are_well_formed")
class LacksTheFirstLogprob(EditsCompletions):
    """Returns one logprob fewer than tokens."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, logprobs=completion.logprobs[1:])


@fault(FORM, "test_completions_are_well_formed")
class ReturnsNothingForOneInTen(EditsCompletions):
    """Returns empty completions now and then."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, token_ids=(), logprobs=()) if request.seed % 10 == 0 else completion


@fault(FORM, "test_completions_are_well_formed")
class PadsToTheLongest(Plain):
    """Returns the padding after the end token."""

    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        longest = max((len(c.token_ids) for c in completions), default=0)
        return [
            dataclasses.replace(
                c,
                token_ids=[*c.token_ids.tolist(), *[PAD] * (longest - len(c.token_ids))],
                logprobs=[*c.logprobs.tolist(), *[0.0] * (longest - len(c.logprobs))],
            )
            for c in completions
        ]


@fault(FORM, "test_completions_are_well_formed")
class CallsItEndOfText(EditsCompletions):
    """Has a finish reason of its own."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, finish_reason="eos")


@fault(FORM, "test_completions_are_well_formed")
class SaysStopAtTheLimit(EditsCompletions):
    """Says ``stop`` where the limit ended a completion."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, finish_reason="stop")


@fault(FORM, "test_every_end_token_ends_and_is_included")
class SaysLengthAtTheEnd(EditsCompletions):
    """Says ``length`` where the last possible token is an end token."""

    def edited(self, request, completion, sampling):
        is_full = len(completion.token_ids) == request.limit(sampling)
        return dataclasses.replace(completion, finish_reason="length") if is_full else completion


@fault(FORM, "test_completions_are_well_formed")
class SaysPositiveLogprobs(EditsCompletions):
    """Returns negative log-likelihoods."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, logprobs=-numpy.asarray(completion.logprobs))


@fault(FORM, "test_completions_are_well_formed")
class HasTokensBeyondTheVocabulary(EditsCompletions):
    """Returns ids that the model does not have."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, token_ids=completion.token_ids + VOCABULARY)


@fault(FORM, "test_completions_are_well_formed")
class LosesLogprobsOfRareTokens(EditsCompletions):
    """Returns NaN for a logprob below -3."""

    def edited(self, request, completion, sampling):
        logprobs = numpy.where(completion.logprobs < -3, numpy.nan, completion.logprobs)
        return dataclasses.replace(completion, logprobs=logprobs)


@fault(FORM, "test_completions_carry_the_version_of_the_weights")
class CountsVersionsItself(EditsCompletions):
    """Stamps one version more than that of the weights."""

    def edited(self, request, completion, sampling):
        return dataclasses.replace(completion, policy_version=completion.policy_version + 1)


@fault(PROMPTS, "test_greedy_is_the_likeliest_token", "a BOS before the prompt")
class AddsABos(EditsPrompts):
    """Puts a BOS before each prompt."""

    def edited(self, prompt):
        return (BOS, *prompt) if len(prompt) < 2000 else prompt


@fault(PROMPTS, "test_greedy_is_the_likeliest_token", "without its last token")
class DropsTheLastToken(EditsPrompts):
    """Leaves out the last token of longer prompts."""

    def edited(self, prompt):
        return prompt[:-1] if len(prompt) > 1 else prompt


@fault(PROMPTS, "test_prompts_are_used_as_they_are")
class StripsEndTokens(EditsPrompts):
    """Takes end tokens out of prompts."""

    def edited(self, prompt):
        return tuple(token for token in prompt if token not in self._policy.eos_token_ids) or prompt


@fault(PROMPTS, "test_prompts_are_used_as_they_are")
class StripsPaddingAtTheEnds(EditsPrompts):
    """Takes padding ids off both ends of prompts."""

    def edited(self, prompt):
        text = "".join(chr(token) for token in prompt).strip(chr(PAD))
        return tuple(map(ord, text)) or prompt


@fault(PROMPTS, "test_prompts_are_used_as_they_are")
class JoinsRepeatedTokens(EditsPrompts):
    """Takes tokens that follow themselves out of prompts, as a text with white space would."""

    def edited(self, prompt):
        return tuple(t for i, t in enumerate(prompt) if i == 0 or t != prompt[i - 1] or t != PAD)


@fault(PROMPTS, "test_greedy_is_the_likeliest_token")
class KnowsTheTokenizersIdsAlone(EditsPrompts):
    """Replaces prompt ids that the tokenizer lacks, though the model embeds them."""

    def edited(self, prompt):
        return tuple(token if token < VOCABULARY - 5 else 3 for token in prompt)


@fault(PROMPTS, "test_long_prompts_are_read_whole")
class ReadsTheLast600(EditsPrompts):
    """Truncates prompts of more than 600 tokens on the left."""

    def edited(self, prompt):
        return prompt[-600:]


@fault(PROMPTS, "test_long_prompts_are_read_whole")
class ForgetsTheMiddle(EditsPrompts):
    """Drops the middle of prompts that are near the context."""

    def edited(self, prompt):
        near = self._policy.max_context - 100
        return prompt if len(prompt) < near else (*prompt[:400], *prompt[-400:])


@fault(PROMPTS, "test_prompts_with_a_common_prefix_are_told_apart")
class CachesByTheFirstTokens(Plain):
    """Finds cached prompts by their first 64 tokens, their length and their last 8."""

    def generate(self, requests, sampling):
        if not sampling.is_greedy:
            return super().generate(requests, sampling)
        cache = self.__dict__.setdefault("_prompts", {})
        seen = [
            cache.setdefault((*r.prompt_ids[:64], len(r.prompt_ids), *r.prompt_ids[-8:]), r.prompt_ids)
            if len(r.prompt_ids) > 100
            else r.prompt_ids
            for r in requests
        ]
        return super().generate(
            [dataclasses.replace(r, prompt_ids=ids) for r, ids in zip(requests, seen, strict=True)], sampling
        )


@fault(PROMPTS, "test_prompts_with_a_common_prefix_are_told_apart")
class CachesByWholeBlocks(Plain):
    """Finds cached prompts by their whole blocks of 16 tokens, and forgets the rest."""

    def generate(self, requests, sampling):
        cache = self.__dict__.setdefault("_blocks", {})
        changed = []
        for request in requests:
            whole = len(request.prompt_ids) // 16 * 16
            if whole < 96:
                changed.append(request)
                continue
            key = (request.prompt_ids[:whole], len(request.prompt_ids))
            changed.append(dataclasses.replace(request, prompt_ids=cache.setdefault(key, request.prompt_ids)))
        return super().generate(changed, sampling)


@fault(PROMPTS, "test_prompts_are_used_as_they_are")
class RetokenizesItsCompletions(Plain):
    """Reads its own former completions without their end tokens."""

    def generate(self, requests, sampling):
        said = self.__dict__.setdefault("_said", set())
        changed = []
        for request in requests:
            ids = request.prompt_ids
            for length in said:
                if len(ids) > length[0] and ids[length[0] - 1] == length[1] and length[1] in self._policy.eos_token_ids:
                    ids = (*ids[: length[0] - 1], *ids[length[0] :])
                    break
            changed.append(dataclasses.replace(request, prompt_ids=ids))
        completions = super().generate(changed, sampling)
        for request, completion in zip(requests, completions, strict=True):
            if len(completion.token_ids):  # none, where the run is told to stop
                said.add((len(request.prompt_ids) + len(completion.token_ids), int(completion.token_ids[-1])))
        return completions


@fault(LIMITS, "test_each_request_has_its_own_limit")
class IgnoresLimitsOfRequests(Plain):
    """Knows the sampling's ``max_new_tokens`` alone."""

    def generate(self, requests, sampling):
        return super().generate([dataclasses.replace(r, max_new_tokens=None) for r in requests], sampling)


@fault(LIMITS, "test_each_request_has_its_own_limit")
class TakesTheSmallestLimit(Plain):
    """Ends all completions where the shortest request ends."""

    def generate(self, requests, sampling):
        least = min((r.limit(sampling) for r in requests), default=1)
        return super().generate(requests, dataclasses.replace(sampling, max_new_tokens=least))


@fault(LIMITS, "test_each_request_has_its_own_limit")
class TakesTheFirstLimit(Plain):
    """Takes the first request's limit for all."""

    def generate(self, requests, sampling):
        limit = requests[0].max_new_tokens if requests else None
        return super().generate([dataclasses.replace(r, max_new_tokens=limit) for r in requests], sampling)


@fault(LIMITS, "test_each_completion_of_a_prompt_has_its_own_limit")
class TakesTheLimitOfAGroup(Plain):
    """Takes requests of one prompt as one request, with the first one's limit."""

    def generate(self, requests, sampling):
        limits: dict[tuple[int, ...], int | None] = {}
        for request in requests:
            limits.setdefault(request.prompt_ids, request.max_new_tokens)
        asked = [dataclasses.replace(each, max_new_tokens=limits[each.prompt_ids]) for each in requests]
        return super().generate(asked, sampling)


@fault(LIMITS, "test_context_ends_a_completion")
class KeepsATokenInReserve(Plain):
    """Ends one token before the context does."""

    def generate(self, requests, sampling):
        limited = [
            dataclasses.replace(
                r, max_new_tokens=max(1, min(r.limit(sampling), max_completion_tokens(r, self._policy) - 1))
            )
            for r in requests
        ]
        return super().generate(limited, sampling)


@fault(LIMITS, "test_context_ends_a_completion")
class EndsAtOneHundredAndFifty(Plain):
    """Generates 150 tokens at most."""

    def generate(self, requests, sampling):
        return super().generate(
            requests, dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, 150))
        )


@fault(LIMITS, "test_context_ends_a_completion")
class SaysHalfItsContext(Plain):
    """Returns half of its context from ``max_context``."""

    def max_context(self, policy):
        return super().max_context(policy) // 2


@fault(LIMITS, "test_prompt_beyond_the_context_is_refused_by_request_id")
class AnswersLongPromptsWithNothing(Plain):
    """Returns an empty completion for a prompt beyond the context."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        try:
            return super().generate(requests, sampling)
        except RunError:
            return [Completion(r.request_id, (), (), "length", self._version) for r in requests]


@fault(LIMITS, "test_prompt_beyond_the_context_is_refused_by_request_id")
class DiesOfLongPrompts(Plain):
    """Reports a prompt beyond the context as a fault, after which the core restarts it for ever."""

    def generate(self, requests, sampling):
        try:
            return super().generate(requests, sampling)
        except RunError as problem:
            raise EngineFault(str(problem)) from problem


class Stopping(HFRollout):
    """Ends completions at stop strings."""

    capabilities = EngineCapabilities(stop_strings=True)
    strings: type[StopStrings] = StopStrings

    def start(self, policy, placement):
        super().start(policy, placement)
        if policy.stop:
            self._stop = self.strings(AutoTokenizer.from_pretrained(policy.path), policy)


@fault(LIMITS, "test_stop_strings_end_completions")
class KeepsTheFirstStopStrings(Stopping):
    """Ends completions at the stop strings of its first start."""

    first = None

    def start(self, policy, placement):
        super().start(policy, placement)
        self.first = self._stop = self.first or self._stop


class StringsOfThePrompt(StopStrings):
    def is_in(self, before, token_ids):
        return any(string in self._decode([before, *token_ids]) for string in self._strings)


@fault(LIMITS, "test_stop_strings_end_completions")
class StopsAtWhatThePromptBegan(Stopping):
    """Ends completions at stop strings that begin in the prompt."""

    strings = StringsOfThePrompt


class StringsOfTwoTokens(StopStrings):
    def is_in(self, before, token_ids):
        return super().is_in([before, *token_ids][-3:][0], token_ids[-2:])

    def end(self, before, token_ids):
        ids = list(map(int, token_ids))
        return next((size for size in range(1, len(ids) + 1) if self.is_in(before, ids[:size])), None)


@fault(LIMITS, "test_stop_strings_end_completions")
class SearchesTwoTokens(Stopping):
    """Looks for stop strings in the newest two tokens."""

    strings = StringsOfTwoTokens


@fault(LIMITS, "test_drawn_rounds_are_answered")
class KeepsGreedyAnswers(Plain):
    """Keeps greedy answers by their prompts until the next sync, whatever limit they had."""

    def update_weights(self, buckets, version):
        self._kept = {}
        return super().update_weights(buckets, version)

    def generate(self, requests, sampling):
        if sampling.temperature > 0 or self.is_stopping():
            return super().generate(requests, sampling)
        new = [request for request in requests if request.prompt_ids not in self._kept]
        for request, completion in zip(new, super().generate(new, sampling), strict=True):
            self._kept[request.prompt_ids] = completion
        return [self._cut(request, sampling) for request in requests]

    def _cut(self, request, sampling):
        kept, limit = self._kept[request.prompt_ids], request.limit(sampling)
        is_cut = len(kept.token_ids) > limit
        return dataclasses.replace(
            kept,
            request_id=request.request_id,
            token_ids=kept.token_ids[:limit],
            logprobs=kept.logprobs[:limit],
            finish_reason="length" if is_cut else kept.finish_reason,
        )
