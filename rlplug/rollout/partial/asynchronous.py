"""Asynchronous rollout: an engine on devices of its own generates while the policy trains."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault
from rlplug.observability.timeline import EngineTimeline
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.engine_driver import EngineDriver
from rlplug.rollout.partial.background import BackgroundGeneration, HeldOutRollout
from rlplug.rollout.partial.enough_groups import CompleteGroups, EnoughGroups
from rlplug.rollout.partial.state import PartialRolloutState
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.trajectory import Trajectory
from rlplug.types import NO_VERSION

POLL_S: Final = 0.01
"""How often the main thread looks for complete groups, in seconds."""
NUM_MEASURED: Final = 10
"""Takes after the first one over which waits are measured, to say which side waits."""
HUNG_S: Final = 300.0
"""Longest time for one call of the engine in the thread, in seconds."""
WAITS: Final = 0.25
"""Share of the time that is worth saying."""
ADVICE: Final = {
    "wait_s": "the trainer waited for groups in {share:.0%} of the time. Give the engines more GPUs (or API processes, "
    "where rollout/api_cpu is near 1), or raise model.partial_rollout.max_staleness.",
    "engine_idle_s": "the engine had nothing to generate in {share:.0%} of the time. Give the trainer more GPUs.",
}
"""What to say of either side."""


MakeLoop: TypeAlias = Callable[[Callable[[], bool]], AgentLoop]
"""Makes the agent loop of this rank's open groups, which breaks off once its argument returns true."""


class AsynchronousRollout:
    """Takes the next groups of a partial rollout, whose other groups are generated on while they train.

    A thread generates from one weight sync to the next. With new weights, or new groups, it is paused: requests are
    aborted, and sent again with their tokens so far. All that ranks do together happens in the main thread.

    Args:
        driver: The driver of this rank's engine.
        ranks: The ranks of this rank's engine.
        board: Exchanges the numbers of complete groups among engines.
        gather: Returns the concatenation of all ranks' lists; collective.
    """

    def __init__(
        self, driver: EngineDriver, ranks: EngineRanks, board: CompleteGroups, gather: Callable[[Any], Any]
    ) -> None:
        self._driver = driver
        self._ranks = ranks
        self._board = board
        self._gather = gather
        self.held_out: HeldOutRollout | None = None
        """What is generated beside the groups, from the next :meth:`take` to :meth:`finish_held_out`."""
        self.timeline = EngineTimeline()
        """What the engine did since it was last taken."""
        self._background: BackgroundGeneration | None = None
        self._version = NO_VERSION
        self._fault: EngineFault | None = None
        """What stopped the engine before the last pause."""
        self._seen_at = 0.0
        """When the thread last looked whether it is paused, which it does between the engine's calls."""
        self._idle_since: float | None = None
        self._num_waits = self._num_takes = 0
        self._metrics: dict[str, float] = {}
        self._totals = dict.fromkeys(ADVICE, 0.0)
        self._measured_since = 0.0

    def take(
        self, state: PartialRolloutState, make_loop: MakeLoop, num_wanted: int, version: int, has_new_groups: bool
    ) -> list[list[Trajectory]]:
        """Return the next groups of this rank's engine, once those of all engines are enough. Collective.

        Args:
            state: The groups; those that are returned leave. A step that streams gets what is complete, and asks again.
            make_loop: Makes the agent loop that generates.
            num_wanted: Groups to take, over all engines.
            version: Version of the policy, whose weights the engine gets.
            has_new_groups: Whether groups were started since the last call.

        Raises:
            RunError: An engine failed and cannot restart, has used up its restarts, or hangs in a call.
            StopRequested: The run is told to stop.
        """
        fault, self._fault = self._fault, None
        num_faults, is_started = 0, False
        while True:
            if self._driver.failed_on_any_rank(fault):
                num_faults += 1
                self.pause()
                self._fault, is_started = None, False
                num_missing = sum(each.finish_reason is None for each in state.all_trajectories)
                num_missing += 0 if self.held_out is None else self.held_out.num_unfinished
                self._driver.restart(fault, num_faults, num_missing)
            elif is_started and (released := state.release(num_wanted, version, self._ranks, self._gather)) is not None:
                if state.awaits_groups:
                    self._driver.restore_trainer()
                else:
                    self._driver.finish()
                    self._say_which_side_waits()
                return released
            is_enough = EnoughGroups(
                own=state.complete,
                suffice=lambda complete: state.is_enough(complete, num_wanted, version),
                board=self._board,
                wait_key=f"asynchronous/{self._num_waits}",
            )
            self._num_waits += 1
            fault = self._start(state, make_loop, version, has_new_groups and not is_started)
            fault = fault or self._wait(is_enough, "wait_s")
            if fault is not None:
                is_enough.tell_failure()
            is_started = True
            self._driver.end_if_stopping(fault, self.pause)

    def finish_held_out(self) -> HeldOutRollout | None:
        """Wait until :attr:`held_out` is complete, and return it; the groups go on meanwhile. Collective.

        Returns:
            ``None`` where an engine failed: it restarts with the policy's newest weights, so what is missing cannot be
            generated any more.

        Raises:
            RunError: The engine failed and cannot restart, or hangs in a call.
            StopRequested: The run is told to stop.
        """
        held_out, self.held_out = self.held_out, None
        assert held_out is not None, "there is a validation, which the last take generated"
        is_enough = EnoughGroups(
            own=held_out.complete,
            suffice=lambda complete: len(complete) == held_out.num_groups,
            board=self._board,
            wait_key=f"held out/{self._num_waits}",
        )
        self._num_waits += 1
        fault = self._wait(is_enough, "validation_wait_s")
        if fault is not None:
            is_enough.tell_failure()
        self._driver.end_if_stopping(fault, self.pause)
        if not self._driver.failed_on_any_rank(fault):
            return held_out
        self.pause()
        self._fault = None
        self._driver.restart(fault, 1, held_out.num_unfinished)
        return None

    def pause(self) -> None:
        """Break off what runs; its tokens so far are in the trajectories then. Safe to call twice."""
        background, self._background = self._background, None
        if background is not None:
            if background.is_running:
                self.timeline.change("pausing")
            else:
                self.timeline.change("idle", at=background.ended_at)
            background.pause()
            self.timeline.change("paused")
            self._fault = background.fault
            self._idle_since = background.ended_at

    def close(self) -> None:
        """Break off what runs, whatever its state."""
        background, self._background = self._background, None
        if background is not None:
            with contextlib.suppress(RunError):  # the engine is closed next
                background.pause()

    def pop_metrics(self) -> dict[str, float]:
        """Return ``partial/...`` since the last call: seconds that step and engine waited, and what was sent again."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    # ---- one wait -------------------------------------------------------------------------------------------------

    def _start(
        self, state: PartialRolloutState, make_loop: MakeLoop, version: int, has_new_groups: bool
    ) -> EngineFault | None:
        """Have the thread generate all groups with the policy's weights; return the fault that prevented it."""
        if self._background is not None and self._version == version and not has_new_groups:
            return None
        self.pause()
        fault, self._fault = self._fault, None
        if fault is not None:
            return fault
        assert self.held_out is None or self.held_out.version == version, "its tokens are of one version"
        state.note_resumed()
        is_paused = threading.Event()

        def looks_at_pause() -> bool:
            self._seen_at = time.monotonic()
            return is_paused.is_set()

        loop = make_loop(looks_at_pause)
        self.timeline.change("weight sync")
        try:
            with self._driver.ready_engine(version) as engine:
                self._seen_at = time.monotonic()
                self._background = BackgroundGeneration(loop.stream, engine, is_paused)
        except EngineFault as problem:
            return problem
        self.timeline.change("generating")
        self._version = version
        if self._idle_since is not None:
            self._add("engine_idle_s", time.monotonic() - self._idle_since)
        return None

    def _wait(self, is_enough: EnoughGroups, metric: str) -> EngineFault | None:
        """Wait for enough groups, or for the end of this rank's thread; return the fault that ended it.

        Args:
            is_enough: Returns whether the groups are enough.
            metric: Name below ``partial/`` of the seconds that it takes.
        """
        began, background = time.monotonic(), self._background
        assert background is not None
        while background.is_running and not is_enough() and not self._driver.engine.is_stopping():
            time.sleep(POLL_S)
            if time.monotonic() - self._seen_at > HUNG_S and background.is_running:
                raise RunError(
                    f"{type(self._driver.engine).__name__} has not returned from submit, collect or abort for "
                    f"{HUNG_S:g} s. Resume from the newest checkpoint with rlplug fit --resume."
                )
        is_enough()  # tells the other engines what came last
        self._add(metric, time.monotonic() - began)
        return background.fault

    def _add(self, name: str, value: float) -> None:
        key = f"partial/{name}"
        self._metrics[key] = self._metrics.get(key, 0.0) + value
        if name in self._totals:
            self._totals[name] += value

    def _say_which_side_waits(self) -> None:
        """Say once, on rank 0, whether trainer or engine waits much, after the first take, which fills the engine."""
        self._num_takes += 1
        if self._num_takes == 1:
            self._totals, self._measured_since = dict.fromkeys(ADVICE, 0.0), time.monotonic()
        elif self._num_takes == NUM_MEASURED + 1:
            seconds = max(time.monotonic() - self._measured_since, 1e-9)
            for name, advice in ADVICE.items():
                if (share := self._totals[name] / seconds) > WAITS:
                    rank_zero_info(f"Asynchronous rollout: {advice.format(share=share)}")
