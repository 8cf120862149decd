"""Counts of a reward: what it asked of its server, and what it found."""

from __future__ import annotations

import threading
from collections import Counter


class Counts:
    """Sums by name that any thread may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()
        self._names: set[str] = set()

    def __reduce__(self) -> tuple[type[Counts], tuple[()]]:
        return Counts, ()  # a copy counts for itself

    def add(self, **values: float) -> None:
        """Add to sums by name."""
        with self._lock:
            self._names.update(values)
            for name, value in values.items():
                self._sums[name] += value  # type: ignore[assignment]

    def pop(self) -> dict[str, float]:
        """Return the sums since the last call; a name that was ever added to stays, with 0."""
        with self._lock:
            sums, self._sums = self._sums, Counter()
            return {name: float(sums[name]) for name in sorted(self._names)}
