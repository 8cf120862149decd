"""What an engine notes of a weight sync: every weight came, and none that it does not know."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator

from rlplug.errors import RunError, did_you_mean
from rlplug.interfaces.weight_sync import Bucket, SyncReport


class WeightReceipt:
    """Counts one weight sync, from when it is made.

    Args:
        engine: Its name, for messages.
        expected: Names of all weights that must come, as the policy's ``named_parameters`` has them.
    """

    def __init__(self, engine: str, expected: Collection[str]) -> None:
        self._began = time.perf_counter()
        self._engine = engine
        self._expected = expected
        self._received: set[str] = set()
        self._num_buckets = self._num_bytes = 0

    def count(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets.

        Raises:
            RunError: A name is unknown.
        """
        for bucket in buckets:
            self._num_buckets += 1
            for name, tensor in bucket:
                if name not in self._expected:
                    raise RunError(f"{self._engine} has no weight {name!r}.{did_you_mean(name, self._expected)}")
                self._received.add(name)
                self._num_bytes += tensor.nbytes
            yield bucket

    def report(self, version: int) -> SyncReport:
        """Return what came, when all buckets have been taken.

        Raises:
            RunError: A weight did not come.
        """
        if missing := sorted(set(self._expected) - self._received):
            raise RunError(f"the weight sync left out {len(missing)} weights of {self._engine}, first {missing[0]!r}.")
        seconds = time.perf_counter() - self._began
        return SyncReport(self._num_bytes, self._num_buckets, len(self._received), seconds, version)
