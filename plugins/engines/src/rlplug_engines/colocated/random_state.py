"""The trainer's random generators, which an engine in its process must leave as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlplug.distributed.rng import rng_state, set_rng_state


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the state of every generator when the context ends."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
