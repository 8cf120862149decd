"""Deadlines of trajectories: which have used up their time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from rlplug.interfaces.rollout import EngineFault, RolloutEngine
from rlplug.rollout.trajectory import Trajectory

ABORT_S: Final = 60.0
"""Longest time for an engine to return a request that it is told to abort, in seconds."""


class TrajectoryDeadlines:
    """Measures how long trajectories are worked on, in one call of the agent loop's ``stream``.

    A trajectory's time passes while its request waits or runs in the engine, and while its environment steps. It stands
    still while generation is paused, and between processes.

    Args:
        trajectories: The trajectories, of which those that finish are left out from then on.
        deadline_s: Seconds after which a trajectory is late; ``None`` for no deadline.
    """

    def __init__(self, trajectories: Sequence[Trajectory], deadline_s: float | None) -> None:
        self._trajectories = list(trajectories)
        self._deadline_s = deadline_s
        self._noted_at = time.monotonic()
        self._asked_at: dict[str, float] = {}

    def note(self, is_last: bool = False) -> None:
        """Add the time since the last note to all trajectories, and mark those that are late.

        Args:
            is_last: Whether the call of ``stream`` ends; else a note that follows soon is left out, since it is cheap
                only for few trajectories.
        """
        now, deadline_s = time.monotonic(), self._deadline_s
        seconds = now - self._noted_at
        if deadline_s is None or (seconds < min(deadline_s / 20, 0.25) and not is_last):
            return
        self._noted_at = now
        self._trajectories = [each for each in self._trajectories if each.finish_reason is None]
        for trajectory in self._trajectories:
            trajectory.seconds += seconds
            trajectory.is_late = trajectory.seconds > deadline_s

    def leave(self, trajectories: Sequence[Trajectory]) -> None:
        """Let the time of some trajectories stand still from now on: they wait for the next call of ``stream``."""
        self.note(is_last=True)
        gone = {id(trajectory) for trajectory in trajectories}
        self._trajectories = [each for each in self._trajectories if id(each) not in gone]

    def to_abort(self, running: dict[str, Trajectory]) -> list[str]:
        """Return the ids of running requests whose trajectories are late, each once."""
        if self._deadline_s is None:
            return []
        late = [name for name, trajectory in running.items() if trajectory.is_late and name not in self._asked_at]
        self._asked_at |= dict.fromkeys(late, time.monotonic())
        return late

    def fault_of(self, engine: RolloutEngine, running: dict[str, Trajectory]) -> EngineFault | None:
        """Return the fault of an engine that should have returned a request long ago, if it keeps one."""
        latest = time.monotonic() - ABORT_S
        for name, asked_at in self._asked_at.items():
            if asked_at < latest and name in running:
                return EngineFault(
                    f"{type(engine).__name__} did not return aborted request {name} within {ABORT_S:g} s."
                )
        return None
