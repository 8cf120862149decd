"""Faults in where a completion ends: at limits, at the context, at stop strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlplug_engines.colocated import max_completion_tokens
from transformers import AutoTokenizer

from engine_faults.faults import Plain, fault
from rlplug.errors import RunError
from rlplug.interfaces import EngineCapabilities, EngineFault
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.turns.stop_strings import StopStrings
from rlplug.types import Completion, Request, SamplingParams

LIMITS = "limits"


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
