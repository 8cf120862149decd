"""Engines with a mistake each in what they generate. ``test_sabotage.py`` runs the checks on them.

Mistakes that have nothing to do with each other share an engine, so that there are fewer to run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import ClassVar

import torch
from rlplug_devkit.engines.distribution import DistributionChecks
from rlplug_devkit.engines.life import CounterChecks, FirstChecks
from rlplug_devkit.engines.prompts import PromptChecks
from rlplug_devkit.engines.tokens import FormChecks
from rlplug_devkit.models import BOS, PAD
from sabotage import Sabotaged, mixed

from rlplug.interfaces import Placement, PolicySpec
from rlplug.rollout.context_limit import max_completion_tokens
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Completion, Request, SamplingParams

# ---- tokens -------------------------------------------------------------------------------------------------------


class AddsBos(HFRollout):
    def generate(self, requests, sampling):
        return super().generate(
            [dataclasses.replace(request, prompt_ids=(BOS, *request.prompt_ids)) for request in requests], sampling
        )


class StripsPadding(HFRollout):
    def generate(self, requests, sampling):
        stripped = [tuple(token for token in r.prompt_ids if token != PAD) or (PAD,) for r in requests]
        return super().generate(
            [dataclasses.replace(r, prompt_ids=ids) for r, ids in zip(requests, stripped, strict=True)], sampling
        )


class ReturnsShortPromptsFirst(HFRollout):
    def generate(self, requests, sampling):
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
        completions = super().generate(requests, sampling)
        return [completions[index] for index in order]


class RefusesNoRequests(HFRollout):
    def generate(self, requests, sampling):
        return [requests[0]] and super().generate(requests, sampling)


class StampsTheFirstVersion(HFRollout):
    def generate(self, requests, sampling):
        return [dataclasses.replace(c, policy_version=1) for c in super().generate(requests, sampling)]


class ReturnsFloats(HFRollout):
    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        return [dataclasses.replace(c, token_ids=c.token_ids.astype(float)) for c in completions]


class CutsEndTokens(HFRollout):
    def generate(self, requests, sampling):
        return [
            dataclasses.replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1])
            if c.finish_reason == "stop" and len(c.token_ids) > 1
            else c
            for c in super().generate(requests, sampling)
        ]


class KnowsOneEndToken(HFRollout):
    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(dataclasses.replace(policy, eos_token_ids=policy.eos_token_ids[:1]), placement)


class CutsAllAtTheContextOfOne(HFRollout):
    def generate(self, requests, sampling):
        rooms = [max_completion_tokens(request, self._policy) for request in requests]
        return super().generate(
            requests, dataclasses.replace(sampling, max_new_tokens=min([*rooms, sampling.max_new_tokens]))
        )


class TruncatesPrompts(HFRollout):
    def generate(self, requests, sampling):
        longest = self._policy.max_context - 1
        return super().generate(
            [dataclasses.replace(request, prompt_ids=request.prompt_ids[-longest:]) for request in requests], sampling
        )


class HasNoSpeedYet(HFRollout):
    def stats(self):
        return {"tokens_per_s": math.nan}


class AdvisesWithoutWords(HFRollout):
    def advice(self):
        return [""]


class MovesTheGlobalGenerator(HFRollout):
    def generate(self, requests, sampling):
        torch.rand(1)
        return super().generate(requests, sampling)


# ---- distribution -------------------------------------------------------------------------------------------------


class IgnoresSeeds(HFRollout):
    _counter: ClassVar = itertools.count()

    def generate(self, requests, sampling):
        return super().generate([dataclasses.replace(r, seed=next(self._counter)) for r in requests], sampling)


class DrawsWhenGreedy(HFRollout):
    def generate(self, requests, sampling):
        return super().generate(requests, dataclasses.replace(sampling, temperature=sampling.temperature or 0.8))


class SeedsAllAlike(HFRollout):
    def generate(self, requests, sampling):
        return super().generate([dataclasses.replace(request, seed=7) for request in requests], sampling)


class _SaysOtherLogprobs(HFRollout):
    @torch.no_grad()
    def with_logprobs(self, request: Request, completion: Completion, sampling: SamplingParams) -> Completion:
        """Return the completion with the logprobs that it has at a temperature, without top-k and top-p."""
        logits = self._model(torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[0]
        logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        chosen = logprobs.gather(-1, torch.tensor(completion.token_ids.tolist())[:, None]).squeeze(-1)
        return dataclasses.replace(completion, logprobs=tuple(chosen.tolist()))


class SaysUntemperedLogprobs(_SaysOtherLogprobs):
    def generate(self, requests, sampling):
        completions, untempered = super().generate(requests, sampling), SamplingParams()
        if sampling.max_new_tokens == 1:
            return completions
        return [self.with_logprobs(r, c, untempered) for r, c in zip(requests, completions, strict=True)]


class DrawsUntempered(_SaysOtherLogprobs):
    """Its logprobs are right: only the tokens are not those that they speak of."""

    def generate(self, requests, sampling):
        untempered = dataclasses.replace(sampling, temperature=min(1.0, 1e9 * sampling.temperature))
        drawn = super().generate(requests, untempered)
        if sampling.is_truncated:
            return super().generate(requests, sampling) if sampling.max_new_tokens > 1 else drawn
        if sampling.max_new_tokens == 1 or sampling.temperature == 1:
            return drawn
        return [self.with_logprobs(r, c, sampling) for r, c in zip(requests, drawn, strict=True)]


# ---- the checks on each -------------------------------------------------------------------------------------------


class TestBos(Sabotaged, PromptChecks):
    engine = AddsBos


class TestOrder(Sabotaged, FormChecks):
    engine = ReturnsShortPromptsFirst


class TestTokens(Sabotaged, PromptChecks, CounterChecks, FormChecks, FirstChecks):
    engine = mixed(
        StripsPadding,
        RefusesNoRequests,
        StampsTheFirstVersion,
        ReturnsFloats,
        KnowsOneEndToken,
        TruncatesPrompts,
        CutsAllAtTheContextOfOne,
        HasNoSpeedYet,
        AdvisesWithoutWords,
        MovesTheGlobalGenerator,
    )


class TestEndTokens(Sabotaged, FormChecks):
    engine = CutsEndTokens


class TestDrawn(Sabotaged, DistributionChecks):
    engine = mixed(IgnoresSeeds, DrawsUntempered)


class TestSaid(Sabotaged, DistributionChecks):
    engine = mixed(DrawsWhenGreedy, SeedsAllAlike, SaysUntemperedLogprobs)
