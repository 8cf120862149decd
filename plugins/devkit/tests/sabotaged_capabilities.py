"""Engines with a mistake each in a capability, or in their claims. ``test_sabotage.py`` runs the checks on them.

Mistakes that have nothing to do with each other share an engine, so that there are fewer to run.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections.abc import Sequence

from capable_engines import CapableRollout
from rlplug_devkit.engines.distribution import DistributionChecks
from rlplug_devkit.engines.life import FirstChecks, LastChecks
from rlplug_devkit.engines.memory import SleepChecks
from rlplug_devkit.engines.streaming import StreamingChecks
from sabotage import Sabotaged, mixed

from rlplug.interfaces import EngineCapabilities, SleepingPart
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Completion, Request, SamplingParams

# ---- sleep --------------------------------------------------------------------------------------------------------


class FreesOnlyItsCache(CapableRollout):
    def _resize(self, share: int) -> None:
        pass


class NeedsWeightsToSleep(CapableRollout):
    def sleep(self) -> None:
        assert self._version is not None
        super().sleep()


class WakesWithoutItsLayers(CapableRollout):
    """The second time: something of the first sleep is left."""

    def wake(self, part: SleepingPart) -> None:
        super().wake(part)
        self._num_wakes = self.__dict__.get("_num_wakes", 0) + (part == "kv_cache")
        if self._num_wakes == 2 and part == "kv_cache":
            self._model.model.norm.weight.data.zero_()


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
        completions = super().collect(timeout_s)
        return [*completions, *completions[:1]]


class StreamsWithSeedsOfItsOwn(CapableRollout):
    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        super().submit([dataclasses.replace(request, seed=request.seed + 1) for request in requests], sampling)


class LosesRequestsOfOtherThreads(CapableRollout):
    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        if not self.__dict__.get("_is_busy"):
            self._is_busy = True
            time.sleep(0.1)
            try:
                super().submit(requests, sampling)
            finally:
                self._is_busy = False


class ClaimsToStream(HFRollout):
    capabilities: EngineCapabilities = EngineCapabilities(streaming=True)


# ---- claims -------------------------------------------------------------------------------------------------------


class PretendsToSleepAndStream(HFRollout):
    """Claims neither, nor logprobs, and does as if."""

    capabilities: EngineCapabilities = EngineCapabilities(logprobs=False)

    def sleep(self) -> None:
        pass

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        pass


# ---- the checks on each -------------------------------------------------------------------------------------------


class SabotagedStream(Sabotaged, StreamingChecks):
    max_context = 400


class TestCapable(LastChecks, StreamingChecks, SleepChecks, FirstChecks):
    def make_engine(self) -> HFRollout:
        return CapableRollout()


class TestSleep(Sabotaged, SleepChecks, FirstChecks):
    engine = mixed(FreesOnlyItsCache, NeedsWeightsToSleep, WakesWithoutItsLayers)


class TestAbort(SabotagedStream):
    engine = IgnoresAbort


class TestCollect(SabotagedStream):
    engine = mixed(RaisesWhenIdle, AbortsWithoutTokens, CollectsAll)


class TestCollectTwice(SabotagedStream):
    engine = CollectsTwice


class TestThreads(SabotagedStream):
    engine = mixed(RemembersAborts, StreamsWithSeedsOfItsOwn, LosesRequestsOfOtherThreads)
    deadline_s = 15.0  # of a busy machine too; requests that are lost cost it


class TestClaims(SabotagedStream):
    engine = ClaimsToStream


class TestNoClaims(Sabotaged, StreamingChecks, SleepChecks, DistributionChecks):
    engine = PretendsToSleepAndStream
