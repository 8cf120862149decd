"""Faults in what an engine reads, and in the form of what it returns."""

from __future__ import annotations

import dataclasses

import numpy
from rlplug_devkit.models import BOS, PAD, VOCABULARY

from engine_faults.faults import EditsCompletions, EditsPrompts, Plain, fault

FORM, ORDER, PROMPTS = "form of answers", "order and number", "prompts"


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
