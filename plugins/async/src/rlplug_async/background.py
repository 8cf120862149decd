"""Generation in a thread beside the training, from one weight sync to the next, a validation's prompts included."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault, RolloutEngine
from rlplug.rollout.trajectory import Trajectory
from rlplug.types import SamplingParams

PAUSE_S: Final = 60.0
"""Longest time for an engine to return the tokens of the requests that it is told to abort, in seconds."""


class BackgroundGeneration:
    """Runs an agent loop's ``stream`` in a thread until nothing is left to generate, or until it is paused.

    The thread alone calls the engine while it runs, and takes part in no collective. Only it changes the trajectories;
    others read them whole after :meth:`pause`, and until then may ask which are finished.

    Args:
        stream: Generates with an engine, and breaks off soon after ``is_paused`` returns true.
        engine: The engine, ready to generate.
        is_paused: The event that tells ``stream`` to break off.
    """

    def __init__(
        self, stream: Callable[[RolloutEngine], None], engine: RolloutEngine, is_paused: threading.Event
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._is_paused = is_paused
        self._problem: BaseException | None = None
        self.ended_at = 0.0
        """``time.monotonic()`` at the end of the thread's work."""
        self._thread = threading.Thread(target=self._run, name="rlplug-rollout", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._stream(self._engine)
        except BaseException as problem:  # noqa: BLE001 - it is raised in the main thread
            self._problem = problem
        self.ended_at = time.monotonic()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def fault(self) -> EngineFault | None:
        """What stopped the engine, if it has failed; any other error of the thread is raised here."""
        if self._problem is None or isinstance(self._problem, EngineFault):
            return self._problem
        raise self._problem

    def pause(self) -> None:
        """Break off what runs; its tokens so far are in the trajectories then. Safe to call twice.

        Raises:
            RunError: The engine does not return them.
        """
        self._is_paused.set()
        self._thread.join(PAUSE_S)
        if self._thread.is_alive():
            raise RunError(
                f"{type(self._engine).__name__} did not return the tokens of aborted requests within {PAUSE_S:g} s. "
                "Resume from the newest checkpoint with rlplug fit --resume."
            )


@dataclass(frozen=True)
class HeldOutRollout:
    """Trajectories of a validation, all of whose tokens come from one version of the policy."""

    groups: Sequence[Sequence[Trajectory]]
    """Those of this rank's engine."""
    sampling: SamplingParams
    """How they are drawn; ``max_new_tokens`` is that of the training groups."""
    version: int
    """Version of the policy."""
    num_groups: int
    """Groups of all engines."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those of all groups."""
        return [trajectory for group in self.groups for trajectory in group]

    def complete(self) -> list[int]:
        """Return the numbers of the groups of this rank's engine whose trajectories are all finished."""
        return [group[0].group for group in self.groups if all(each.finish_reason is not None for each in group)]

    @property
    def num_unfinished(self) -> int:
        """Trajectories of this rank's engine that want more tokens."""
        return sum(each.finish_reason is None for each in self.trajectories)
