"""When state of the trainer may leave the device: the base offloads nothing, as for ``memory.offload: none``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

OffloadMode: TypeAlias = Literal["none", "optimizer", "optimizer_and_weights"]


class Offload:
    """Calls of a step, in their order, around what the engine and the update need on the device."""

    def before_engine_wakes(self) -> None:
        """Offload all but the weights, which the sync reads."""

    def before_generation(self) -> None:
        """Offload the weights once the engine has them, before its KV cache takes memory."""

    def after_generation(self) -> None:
        """Restore the weights."""

    @contextmanager
    def reference_on_device(self) -> Iterator[None]:
        """Keep the reference policy on the device inside the context, for its forward-only pass."""
        yield

    def before_update(self) -> None:
        """Start to restore the optimizers' state; the first optimizer step waits for it."""

    def after_step(self) -> None:
        """Restore all state that a checkpoint saves: an interrupted or validating step leaves some of it offloaded."""

    def pop_metrics(self) -> dict[str, float]:
        """Return ``offload/...`` since the last call; empty where nothing is offloaded."""
        return {}
