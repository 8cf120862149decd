"""Faults in weights: what arrives, what stays, and what a sync costs."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine_faults.faults import Capable, Plain, fault
from rlplug.errors import RunError
from rlplug.interfaces import Bucket, Placement, PolicySpec, SleepingPart, SyncReport
from rlplug.types import Completion, Request, SamplingParams

SYNC, MEMORY = "weight sync", "memory"
SMALL = "test_a_small_update_arrives"


class EditsBuckets(Plain):
    """Loads other tensors than those that came."""

    def edited(self, name: str, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        self.own = dict(self._model.named_parameters())
        return super().update_weights(([(n, self.edited(n, t)) for n, t in b] for b in buckets), version)


@fault(SYNC, SMALL)
class SkipsSmallChanges(EditsBuckets):
    """Keeps weights that hardly change, as ``allclose`` sees it."""

    def edited(self, name, tensor):
        own = self.own[name].detach()
        return own.clone() if torch.allclose(own, tensor, rtol=1e-4, atol=1e-4) else tensor


@fault(SYNC, SMALL)
class SkipsSmallNorms(EditsBuckets):
    """Keeps a weight whose relative change is below one in ten thousand."""

    def edited(self, name, tensor):
        own = self.own[name].detach()
        return own.clone() if (tensor - own).norm() < 1e-4 * own.norm() else tensor


@fault(SYNC, SMALL)
class ChecksumsTheFirstDigits(EditsBuckets):
    """Takes a weight as unchanged when its sum has the same three digits."""

    def edited(self, name, tensor):
        own = self.own[name].detach()
        return own.clone() if f"{own.double().abs().sum():.3e}" == f"{tensor.double().abs().sum():.3e}" else tensor


@fault(SYNC, "test_a_small_update_arrives")
class SkipsSmallChangesOfNorms(EditsBuckets):
    """Keeps the weights of norms when they hardly change."""

    def edited(self, name, tensor):
        own = self.own[name].detach()
        return own.clone() if "norm" in name and torch.allclose(own, tensor, rtol=1e-4, atol=1e-4) else tensor


@fault(SYNC, "test_greedy_is_the_likeliest_token", "another dtype")
class HoldsItInBfloat16(EditsBuckets):
    """Rounds the weights to bfloat16."""

    def edited(self, name, tensor):
        return tensor.bfloat16().float()


@fault(SYNC, "test_greedy_is_the_likeliest_token", "the weights")
class AddsNoise(EditsBuckets):
    """Adds noise of a tenth to its weights."""

    def edited(self, name, tensor):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        return tensor + 0.1 * tensor.std() * noise if tensor.numel() > 1 else tensor


@fault(SYNC, "test_greedy_is_the_likeliest_token", "noise in weights")
class AddsALittleNoise(EditsBuckets):
    """Adds noise of a thousandth to its weights."""

    def edited(self, name, tensor):
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        return tensor + 1e-3 * tensor.std() * noise if tensor.numel() > 1 else tensor


@fault(SYNC, "test_each_request_has_its_own_limit", "look at update_weights")
class KeepsALayer(EditsBuckets):
    """Keeps the second layer of the first sync."""

    def edited(self, name, tensor):
        if ".layers.1." not in name:
            return tensor
        return self.__dict__.setdefault("_kept", {}).setdefault(name, tensor.clone())


@fault(SYNC, "test_new_weights_are_used")
class KeepsTheNorms(EditsBuckets):
    """Keeps the norms of the first sync."""

    def edited(self, name, tensor):
        return self.__dict__.setdefault("_kept", {}).setdefault(name, tensor.clone()) if "norm" in name else tensor


@fault(SYNC, "test_every_end_token_ends_and_is_included", "look at update_weights")
class AveragesWeights(EditsBuckets):
    """Averages new weights with the former ones, after the first sync."""

    def edited(self, name, tensor):
        kept = self.__dict__.setdefault("_kept", {})
        former, kept[name] = kept.get(name, tensor), tensor.clone()
        return (former + tensor) / 2


@fault(SYNC, "test_every_end_token_ends_and_is_included", "look at update_weights")
class IsASyncBehind(EditsBuckets):
    """Uses the weights of the sync before."""

    def edited(self, name, tensor):
        kept = self.__dict__.setdefault("_kept", {})
        former, kept[name] = kept.get(name, tensor), tensor.clone()
        return former


@fault(SYNC, "test_a_stopped_call_answers_every_request", "look at update_weights")
class KnowsWeightsByTheirSum(EditsBuckets):
    """Skips a sync whose first tensor has the sum of one that it has seen."""

    def edited(self, name, tensor):
        seen = self.__dict__.setdefault("_seen", {})
        sums = seen.setdefault(name, [])
        total = float(tensor.double().sum())
        if total in sums[:-1]:
            return self.own[name].detach().clone()
        sums.append(total)
        return tensor


@fault(SYNC, "test_buckets_are_left_as_they_are")
class WritesIntoBuckets(Plain):
    """Scales tensors of a bucket in place once it has loaded them."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        def written() -> Iterator[Bucket]:
            for bucket in buckets:
                yield bucket
                for _, tensor in bucket:
                    tensor.mul_(0.5)

        return super().update_weights(written(), version)


@fault(SYNC, "test_buckets_are_left_as_they_are")
class SortsABucketsRows(EditsBuckets):
    """Rotates rows of a projection in place, and back in its own copy, as layouts of rotary embeddings need."""

    def edited(self, name, tensor):
        if "q_proj" not in name:
            return tensor
        right = tensor.clone()
        tensor.copy_(tensor.flip(0))
        return right


@fault(SYNC, "test_every_end_token_ends_and_is_included", "look at update_weights")
class LoadsInTheBackground(Plain):
    """Says that the sync is done while a thread still copies."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        if getattr(self, "_thread", None) is not None:
            self._thread.join()
        kept = [[(n, t.clone()) for n, t in bucket] for bucket in buckets]
        if self._version is None:
            return super().update_weights(kept, version)
        self._version = version
        self._thread = threading.Timer(0.3, super().update_weights, (kept, version))
        self._thread.start()
        tensors = [tensor for bucket in kept for _, tensor in bucket]
        return SyncReport(sum(t.nbytes for t in tensors), len(kept), len(tensors), 1e-4, version)

    def close(self) -> None:
        if getattr(self, "_thread", None) is not None:
            self._thread.join()
        super().close()


@fault(SYNC, "test_every_bucket_is_consumed_and_reported")
class CountsTwice(Plain):
    """Counts every tensor twice."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        import dataclasses

        report = super().update_weights(buckets, version)
        return dataclasses.replace(report, num_tensors=2 * report.num_tensors)


@fault(SYNC, "test_sync_of_the_same_version_is_taken")
class RefusesAVersionItHas(Plain):
    """Skips a sync whose version it has, though the core sends one again after a failure."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        if version == self._version:
            tensors = [tensor for bucket in buckets for _, tensor in bucket]
            return SyncReport(sum(t.nbytes for t in tensors), 1, len(tensors), 1e-4, version)
        return super().update_weights(buckets, version)


@fault(SYNC, "test_sync_of_a_lower_version_is_taken")
class IgnoresLowerVersions(Plain):
    """Skips a sync whose version is below its own, as after going back to a checkpoint."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        if version >= (self._version or 0):
            return super().update_weights(buckets, version)
        tensors = [tensor for bucket in buckets for _, tensor in bucket]
        return SyncReport(sum(t.nbytes for t in tensors), 1, len(tensors), 1e-4, version)


@fault(SYNC, "test_sync_of_the_same_version_is_taken")
class KeepsAnswersByVersion(Plain):
    """Returns completions that it has for a prompt, a seed and a version."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        kept = self.__dict__.setdefault("_kept", {})
        if sampling.extra or self.is_stopping():
            return super().generate(requests, sampling)
        keys = [(r.prompt_ids, r.seed, r.limit(sampling), hash(sampling), self._version) for r in requests]
        new = [(key, request) for key, request in zip(keys, requests, strict=True) if key not in kept]
        kept |= zip([key for key, _ in new], super().generate([r for _, r in new], sampling), strict=True)
        return [dataclasses.replace(kept[k], request_id=r.request_id) for k, r in zip(keys, requests, strict=True)]


@fault(SYNC, "test_unknown_name_is_refused")
class DropsUnknownNames(Plain):
    """Ignores weights that it does not know, though one of its own is missing."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        own = dict(self._model.named_parameters())
        kept = [[(n, t.clone()) for n, t in bucket if n in own] for bucket in buckets]
        missing = own.keys() - {n for bucket in kept for n, _ in bucket}
        added = [[(n, own[n].detach().clone()) for n in missing]] if missing else []
        return super().update_weights([*kept, *added], version)


@fault(MEMORY, "test_rounds_of_a_run_do_not_grow")
class KeepsEverySync(Plain):
    """Keeps a copy of the weights of each sync."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        kept = self.__dict__.setdefault("_history", [])
        return super().update_weights((kept.append([t.clone() for _, t in b]) or b for b in buckets), version)


@fault(MEMORY, "test_rounds_of_a_run_do_not_grow")
class KeepsEveryCache(Plain):
    """Keeps the KV cache of each call."""

    def generate(self, requests, sampling):
        if len(requests) <= 4:
            self.__dict__.setdefault("_caches", []).append(torch.ones(300_000))
        return super().generate(requests, sampling)


@fault(MEMORY, "test_rounds_of_a_run_leave_no_threads_files_or_processes")
class StartsAThreadEachTime(Plain):
    """Starts a thread in each sync that never ends."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().update_weights(buckets, version)


@fault(MEMORY, "test_rounds_of_a_run_leave_no_threads_files_or_processes")
class OpensAFileEachTime(Plain):
    """Opens a file in each sync and leaves it open."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        self.__dict__.setdefault("_files", []).append(open("/dev/null"))  # noqa: SIM115
        return super().update_weights(buckets, version)


@fault(MEMORY, "test_sleep_frees_memory")
class SleepsWithItsWeights(Capable):
    """Frees nothing when it sleeps."""

    def sleep(self) -> None:
        self._slept = True

    def wake(self, part) -> None:
        pass


@fault(MEMORY, "test_sleep_frees_memory")
class CopiesItsWeightsToSleep(Capable):
    """Keeps a copy of the weights while it sleeps."""

    def sleep(self) -> None:
        self._copies = [parameter.detach().clone() for parameter in self._model.parameters()]
        super().sleep()

    def wake(self, part) -> None:
        super().wake(part)
        self._copies = []


@fault(MEMORY, "test_stats_and_advice_while_asleep")
class HasNoStatsAsleep(Capable):
    """Raises when the core asks for its counters while it sleeps."""

    def sleep(self) -> None:
        super().sleep()
        self._sleeps = True

    def wake(self, part) -> None:
        super().wake(part)
        self._sleeps = False

    def stats(self):
        assert not self.__dict__.get("_sleeps"), "asleep"
        return super().stats()


@fault(MEMORY, "test_round_of_a_step")
class SleepsOnce(Capable):
    """Frees nothing and wakes nothing the second time, and has zeros then."""

    def wake(self, part) -> None:
        self._wakes = self.__dict__.get("_wakes", 0) + 1
        if self._wakes > 2 and part == "kv_cache":
            for parameter in self._model.parameters():
                parameter.data.zero_()
        super().wake(part)


@fault(SYNC, "test_additional_name_is_refused")
class LooksForNamesThatLack(Plain):
    """Looks at unknown names only where a weight is missing."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        known, strays = dict(self._model.named_parameters()), list[str]()

        def kept() -> Iterator[Bucket]:
            for bucket in buckets:
                strays.extend(name for name, _ in bucket if name not in known)
                yield [(name, tensor) for name, tensor in bucket if name in known]

        try:
            return super().update_weights(kept(), version)
        except RunError as error:
            raise RunError(f"{error} It has {strays} instead.") from error


@fault(SYNC, "test_round_of_a_step", "no answer of before")
class KeepsAnswersThroughItsSleep(Capable):
    """Forgets its answers when weights come, and not when they come to an engine that slept."""

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        self._answers: dict[tuple[object, ...], Completion] = {}
        self._sleeps = False

    def sleep(self) -> None:
        self._sleeps = True
        super().sleep()

    def wake(self, part: SleepingPart) -> None:
        super().wake(part)
        self._sleeps = self._sleeps and part == "weights"

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        if not self._sleeps:
            self._answers = {}
        return super().update_weights(buckets, version)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        keys = [(r.prompt_ids, r.seed, r.limit(sampling), sampling) for r in requests]
        answers = dict(zip(keys, super().generate(requests, sampling), strict=True))
        if not self.is_stopping() and sampling.is_greedy:
            self._answers = answers | self._answers
            answers = self._answers
        return [
            dataclasses.replace(answers[key], request_id=r.request_id, policy_version=self._version)
            for key, r in zip(keys, requests, strict=True)
        ]
