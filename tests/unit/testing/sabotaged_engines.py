"""Engines with a mistake each, and the checks run on them. ``test_sabotage.py`` runs this file in a pytest of its own.

Mistakes that have nothing to do with each other share an engine, so that there are fewer to run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import queue
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from capable_engines import CapableRollout

from rlplug.interfaces import Bucket, EngineCapabilities, Placement, PolicySpec, SyncReport
from rlplug.rollout.hf import HFRollout
from rlplug.testing.base import EngineChecks
from rlplug.testing.distribution import DistributionChecks
from rlplug.testing.memory import SleepChecks
from rlplug.testing.models import BOS, PAD
from rlplug.testing.streaming import StreamingChecks
from rlplug.testing.tokens import FirstChecks, TokenChecks
from rlplug.testing.weights import TiedWeightChecks, WeightChecks
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


class ReturnsTensors(HFRollout):
    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        return [dataclasses.replace(c, token_ids=tuple(torch.tensor(c.token_ids))) for c in completions]


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
        room = min((self._room(request) for request in requests), default=sampling.max_new_tokens)
        return super().generate(
            requests, dataclasses.replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))
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


class MovesTheGlobalGenerator(HFRollout):
    def generate(self, requests, sampling):
        torch.rand(1)
        return super().generate(requests, sampling)


class GeneratesWithoutWeights(HFRollout):
    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        self._version = 0


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
        chosen = logprobs.gather(-1, torch.tensor([completion.token_ids]).T).squeeze(-1)
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


# ---- weights ------------------------------------------------------------------------------------------------------


class KeepsItsPrefixCache(HFRollout):
    """Continues a prompt that it has seen with the weights of that time."""

    def generate(self, requests, sampling):
        cache = self.__dict__.setdefault("_cache", {})
        completions = super().generate(requests, sampling)
        return [
            dataclasses.replace(cache.setdefault((r.prompt_ids, r.seed, sampling), c), policy_version=c.policy_version)
            for r, c in zip(requests, completions, strict=True)
        ]


class DropsTheSecondBucket(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        mine = dict(self._model.named_parameters())
        return super().update_weights(
            ([(name, mine[name].clone()) for name, _ in b] if i == 1 else b for i, b in enumerate(buckets)), version
        )


class CopiesBucketsTooLate(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        return super().update_weights(list(buckets), version)


class LeavesTheHeadBehind(HFRollout):
    """Has an output layer of its own, which a sync of tied embeddings does not reach."""

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        if self._model.config.tie_word_embeddings:
            head = self._model.lm_head.weight.detach().clone()
            del self._model.lm_head.weight
            self._model.lm_head.register_buffer("weight", head)


class StopsAtTheLastName(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        def until_complete():
            missing = dict(self._model.named_parameters()).keys()
            for bucket in buckets:
                missing = missing - {name for name, _ in bucket}
                yield bucket
                if not missing:
                    return

        return super().update_weights(until_complete(), version)


class MiscountsBytes(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        report = super().update_weights(buckets, version)
        return dataclasses.replace(report, num_bytes=report.num_bytes // 2)


class AcceptsAnyNames(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        mine = dict(self._model.named_parameters())

        def lenient():
            missing = set(mine)
            for bucket in buckets:
                yield [(name, tensor) for name, tensor in bucket if name in mine]
                missing -= {name for name, _ in bucket}
            yield [(name, mine[name].clone()) for name in missing]

        report = super().update_weights(lenient(), version)
        return dataclasses.replace(report, num_buckets=report.num_buckets - 1)


class ForgivesFailedSyncs(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        before = self._version
        try:
            return super().update_weights(buckets, version)
        finally:
            self._version = version if self._version is not None else before


class ClosesOnce(HFRollout):
    def close(self) -> None:
        del self._model


# ---- sleep --------------------------------------------------------------------------------------------------------


class FreesOnlyItsCache(CapableRollout):
    def _resize(self, share: int) -> None:
        pass


class TrustsWeightsThatSlept(CapableRollout):
    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        version = self._version
        super().sleep(tags)
        self._version = version


class GeneratesInItsSleep(FreesOnlyItsCache):
    def generate(self, requests, sampling):
        return HFRollout.generate(self, requests, sampling)

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        pass


class NeedsWeightsToSleep(CapableRollout):
    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        assert self._version is not None
        super().sleep(tags)


class WakesWithoutItsLayers(CapableRollout):
    """The second time: something of the first sleep is left."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().wake(tags)
        self._num_wakes = self.__dict__.get("_num_wakes", 0) + ("kv_cache" in tags)
        if self._num_wakes == 2 and "kv_cache" in tags:
            self._model.model.norm.weight.data.zero_()


class SleepsWholeOrNotAtAll(CapableRollout):
    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        super().sleep(("weights", "kv_cache"))


# ---- streaming ----------------------------------------------------------------------------------------------------


class IgnoresAbort(CapableRollout):
    def abort(self, request_ids: Sequence[str]) -> None:
        pass


class AbortsWithoutTokens(CapableRollout):
    def collect(self, timeout_s: float) -> list[Completion]:
        return [
            dataclasses.replace(c, token_ids=(), logprobs=()) if c.finish_reason == "abort" else c
            for c in super().collect(timeout_s)
        ]


class RemembersAborts(CapableRollout):
    def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.request_ids |= set(request_ids)


class CollectsAll(CapableRollout):
    """Waits for everything that runs, as a loop over futures would."""

    def collect(self, timeout_s: float) -> list[Completion]:
        while self._unfinished:
            time.sleep(0.01)
        return super().collect(timeout_s)


class RaisesWhenIdle(CapableRollout):
    def collect(self, timeout_s: float) -> list[Completion]:
        if not self._unfinished and self._finished.empty():
            raise queue.Empty
        return super().collect(timeout_s)


class CollectsTwice(CapableRollout):
    def collect(self, timeout_s: float) -> list[Completion]:
        if repeated := self.__dict__.pop("_repeated", None):
            return repeated
        completions = super().collect(timeout_s)
        self._repeated = completions[:1]
        return completions


class StreamsWithSeedsOfItsOwn(CapableRollout):
    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        super().submit([dataclasses.replace(request, seed=request.seed + 1) for request in requests], sampling)


class LosesRequestsOfOtherThreads(CapableRollout):
    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        if not self.__dict__.get("_is_busy"):
            self._is_busy = True
            time.sleep(0.1)
            super().submit(requests, sampling)
            self._is_busy = False


class ClaimsToStream(HFRollout):
    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(streaming=True)


# ---- claims -------------------------------------------------------------------------------------------------------


class PretendsToSleepAndStream(HFRollout):
    """Claims neither, nor logprobs, and does as if."""

    capabilities: ClassVar[EngineCapabilities] = EngineCapabilities(logprobs=False)

    def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        pass

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        pass


# ---- the checks on each -------------------------------------------------------------------------------------------


class Sabotaged(EngineChecks):
    num_draws = 400
    max_context = 1024
    engine: ClassVar[type[HFRollout]]

    def make_engine(self) -> HFRollout:
        return self.engine()

    def device_bytes_in_use(self, engine):
        return engine.bytes_in_use()


class SabotagedStream(Sabotaged, StreamingChecks):
    max_context = 400


def mixed(*mistakes: type[HFRollout]) -> type[HFRollout]:
    return type("And".join(mistake.__name__ for mistake in mistakes), mistakes, {})


class TestCapable(StreamingChecks, SleepChecks, FirstChecks):
    def make_engine(self) -> HFRollout:
        return CapableRollout()


class TestFirst(Sabotaged, FirstChecks):
    engine = GeneratesWithoutWeights


class TestBos(Sabotaged, TokenChecks):
    engine = AddsBos


class TestOrder(Sabotaged, TokenChecks):
    engine = ReturnsShortPromptsFirst


class TestTokens(Sabotaged, TokenChecks):
    engine = mixed(
        StripsPadding,
        RefusesNoRequests,
        StampsTheFirstVersion,
        ReturnsTensors,
        KnowsOneEndToken,
        TruncatesPrompts,
        CutsAllAtTheContextOfOne,
        HasNoSpeedYet,
        MovesTheGlobalGenerator,
    )


class TestEndTokens(Sabotaged, TokenChecks):
    engine = CutsEndTokens


class TestDrawn(Sabotaged, DistributionChecks):
    engine = mixed(IgnoresSeeds, DrawsUntempered)


class TestSaid(Sabotaged, DistributionChecks):
    engine = mixed(DrawsWhenGreedy, SeedsAllAlike, SaysUntemperedLogprobs)


class TestArrival(Sabotaged, TiedWeightChecks, WeightChecks):
    engine = mixed(KeepsItsPrefixCache, DropsTheSecondBucket, LeavesTheHeadBehind, StopsAtTheLastName, ClosesOnce)


class TestLate(Sabotaged, WeightChecks):
    engine = CopiesBucketsTooLate


class TestNames(Sabotaged, WeightChecks):
    engine = mixed(AcceptsAnyNames, MiscountsBytes)


class TestFailedSyncs(Sabotaged, WeightChecks):
    engine = ForgivesFailedSyncs


class TestFrees(Sabotaged, SleepChecks, FirstChecks):
    engine = mixed(FreesOnlyItsCache, NeedsWeightsToSleep)


class TestTrusts(Sabotaged, SleepChecks):
    engine = TrustsWeightsThatSlept


class TestNeverSleeps(Sabotaged, SleepChecks):
    engine = GeneratesInItsSleep


class TestWakes(Sabotaged, SleepChecks):
    engine = mixed(WakesWithoutItsLayers, SleepsWholeOrNotAtAll)


class TestAbort(SabotagedStream):
    engine = IgnoresAbort


class TestCollect(SabotagedStream):
    engine = mixed(RaisesWhenIdle, AbortsWithoutTokens, CollectsAll)


class TestCollectTwice(SabotagedStream):
    engine = CollectsTwice


class TestThreads(SabotagedStream):
    engine = mixed(RemembersAborts, StreamsWithSeedsOfItsOwn, LosesRequestsOfOtherThreads)
    deadline_s = 4.0


class TestClaims(SabotagedStream):
    engine = ClaimsToStream


class TestNoClaims(Sabotaged, StreamingChecks, SleepChecks, DistributionChecks):
    engine = PretendsToSleepAndStream
