"""Engines with a mistake each in their weights, or at their ends. ``test_sabotage.py`` runs the checks on them.

Mistakes that have nothing to do with each other share an engine, so that there are fewer to run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

from rlplug_devkit.engines.life import LastChecks
from rlplug_devkit.engines.weights import OtherModelChecks, WeightChecks
from sabotage import Sabotaged, mixed
from torch import Tensor

from rlplug.errors import RunError
from rlplug.interfaces import Bucket, Placement, PolicySpec, SyncReport
from rlplug.rollout.hf_engine import HFRollout

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


class ConfusesExperts(HFRollout):
    """Gives matrices of experts what came for others."""

    confused: ClassVar[tuple[str, str]]
    """Parts of names: of those that are wrong, and of what they get."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        return super().update_weights((self._confuse(dict(bucket)) for bucket in buckets), version)

    def _confuse(self, tensors: dict[str, Tensor]) -> Bucket:
        return [(n, tensors[n.replace(*self.confused)] if ".experts." in n else t) for n, t in tensors.items()]


class RepeatsAnExpert(ConfusesExperts):
    confused = (".experts.0.", ".experts.1.")


class TakesUpForGate(ConfusesExperts):
    confused = (".gate_proj.", ".up_proj.")


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


class AcceptsHalfASync(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        try:
            return super().update_weights(buckets, version)
        except ConnectionError:
            return SyncReport(num_bytes=0, num_buckets=0, num_tensors=0, seconds=0.0, policy_version=version)


class StaysInAFailedSync(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        if self.__dict__.get("_is_syncing"):
            raise RunError("StaysInAFailedSync takes one sync at a time.")
        self._is_syncing = True
        report = super().update_weights(buckets, version)
        self._is_syncing = False
        return report


# ---- start and close ----------------------------------------------------------------------------------------------


class StartsOnce(HFRollout):
    def start(self, policy: PolicySpec, placement: Placement) -> None:
        if "_device" not in self.__dict__:
            super().start(policy, placement)


class ClosesOnce(HFRollout):
    def close(self) -> None:
        del self._model


# ---- the checks on each -------------------------------------------------------------------------------------------


class TestArrival(Sabotaged, OtherModelChecks, WeightChecks):
    engine = mixed(KeepsItsPrefixCache, DropsTheSecondBucket, LeavesTheHeadBehind, StopsAtTheLastName)


class TestExperts(Sabotaged, OtherModelChecks):
    engine = RepeatsAnExpert


class TestGates(Sabotaged, OtherModelChecks):
    engine = TakesUpForGate


class TestLate(Sabotaged, WeightChecks):
    engine = CopiesBucketsTooLate


class TestNames(Sabotaged, WeightChecks):
    engine = mixed(AcceptsAnyNames, AcceptsHalfASync, MiscountsBytes)


class TestFailedSyncs(Sabotaged, WeightChecks):
    engine = StaysInAFailedSync


class TestStartAndClose(Sabotaged, LastChecks):
    engine = mixed(StartsOnce, ClosesOnce)
