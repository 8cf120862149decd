"""The options of a profile, and the callback that a plugin makes of them."""

from __future__ import annotations

from typing import Annotated, Literal

from lightning.pytorch import Callback

from rlplug.errors import ConfigError
from rlplug.plugin_manager import plugins
from rlplug.types.ranges import Range


class StepProfiler(Callback):
    """Profiler of some steps, which take longer while they are profiled.

    Args:
        steps: RL steps to profile, counted from 1: ``5``, or ``5-7`` with both ends; ``null`` profiles none. Choose
            steps after the first ones, which warm up.
        tool: ``torch`` writes a trace to ``profile/`` in the run folder, which observers may summarize; ``memory``
            writes each allocation of GPU memory. ``nsys`` marks the steps for Nsight Systems, under which the run must
            have been started.
        ranks: Profile only the ``first`` rank, or ``all`` with a trace each; the summary is that of the first rank.
    """

    def __init__(
        self,
        steps: Annotated[int, Range(0, 10_000_000)] | str | None = None,
        tool: Literal["torch", "memory", "nsys"] = "torch",
        ranks: Literal["first", "all"] = "first",
    ) -> None:
        self.callbacks: list[Callback] = []
        """What profiles the steps, where there are some: it takes this one's place in the trainer."""
        if steps is not None:
            made = plugins().hook.rlplug_make_profiler(steps=str(steps), tool=tool, ranks=ranks)
            if made is None:
                how = plugins().how_to_get("rlplug_make_profiler")
                raise ConfigError(f"profile.steps comes with {how} Or remove it.")
            self.callbacks.append(made)
