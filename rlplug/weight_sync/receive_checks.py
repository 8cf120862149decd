"""Checks of a weight sync on the engine's side: every expected tensor comes with its shape and dtype, and no other."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from rlplug.errors import RunError, did_you_mean
from rlplug.interfaces.weight_sync import Bucket, FP8Weights, SyncReport, TensorInfo


class WeightSyncValidator:
    """Validates and measures one weight sync, timed from the constructor on.

    Args:
        engine: Name of the engine, for messages.
        expected: All tensors that must be received, by name: :func:`rlplug.weight_sync.manifest.policy_weights`.
    """

    def __init__(self, engine: str, expected: Mapping[str, TensorInfo]) -> None:
        self._began = time.perf_counter()
        self._engine = engine
        self._expected = expected
        self._received: set[str] = set()
        self._num_buckets = self._num_bytes = 0

    def count(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets, each checked and counted.

        Raises:
            RunError: A name is unknown, a tensor has another shape or dtype, or an FP8 weight lacks its scales.
        """
        for bucket in buckets:
            self._num_buckets += 1
            for name, tensor in bucket:
                self._check(name, tensor)
                self._received.add(name)
                self._num_bytes += tensor.nbytes
            self._check_scales(bucket)
            yield bucket

    def _check(self, name: str, tensor: Tensor) -> None:
        expected = self._expected.get(name)
        if expected is None:
            raise RunError(f"{self._engine} has no weight {name!r}.{did_you_mean(name, self._expected)}")
        found = TensorInfo(tensor.shape, tensor.dtype)
        if found != expected:
            raise RunError(f"{self._engine} needs {name!r} as {_words(expected)}, and it came as {_words(found)}.")

    def _check_scales(self, bucket: Bucket) -> None:
        """Raise an error unless FP8 values and scales are in the same bucket, so that they are from the same sync."""
        names = {name for name, _ in bucket}
        for name, tensor in bucket:
            if tensor.dtype == FP8Weights.DTYPE and FP8Weights.scale_name(name) not in names:
                raise RunError(f"weight {name!r} came to {self._engine} in FP8 without its scales in the same bucket.")

    def require_all(self) -> None:
        """Raise ``RunError`` unless all expected weights were received."""
        if missing := sorted(set(self._expected) - self._received):
            raise RunError(f"the weight sync left out {len(missing)} weights of {self._engine}, first {missing[0]!r}.")

    def report(self, version: int, parts: Mapping[str, float] | None = None) -> SyncReport:
        """Return the report of the sync, after all buckets; ``parts`` are seconds by name.

        Raises:
            RunError: An expected weight was not received.
        """
        self.require_all()
        seconds = time.perf_counter() - self._began
        return SyncReport(self._num_bytes, self._num_buckets, len(self._received), seconds, version, parts or {})


def _words(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
