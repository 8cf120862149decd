"""Asynchronous rollout: an engine on devices of its own generates while the policy trains."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final

from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault
from rlplug.observability.phase_progress import PhaseProgress
from rlplug.rollout.agent_loop import GenerationStep
from rlplug.rollout.config import PartialRollout
from rlplug.rollout.source import RolloutRequest
from rlplug.rollout.streaming import StreamingLoop
from rlplug.rollout.trajectory import Trajectory
from rlplug.types import NO_VERSION, Sample, SamplingParams
from rlplug_async.background import BackgroundGeneration, HeldOutRollout
from rlplug_async.enough_groups import EnoughGroups
from rlplug_async.source import PartialSource
from rlplug_async.streamed_step import StreamedStep

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


class AsynchronousSource(PartialSource):
    """A partial rollout whose groups are generated on while others train.

    A thread generates from one weight sync to the next. With new weights, or new groups, it is paused: requests are
    aborted, and sent again with their tokens so far. All that ranks do together happens in the main thread.

    Args:
        options: Limits of the partial rollout.
        prompts_per_step: Groups that a step trains on.
    """

    def __init__(self, options: PartialRollout, prompts_per_step: int) -> None:
        super().__init__(options, prompts_per_step)
        if options.streams:
            self.make_step_training = StreamedStep
        self.held_out: HeldOutRollout | None = None
        """What is generated beside the groups, from the next :meth:`next_groups` to :meth:`finish_held_out`."""
        self._background: BackgroundGeneration | None = None
        self._version = NO_VERSION
        self._seen_at = 0.0
        """When the thread last looked whether it is paused, which it does between the engine's calls."""
        self._idle_since: float | None = None
        self._num_waits = self._num_takes = 0
        self._metrics: dict[str, float] = {}
        self._totals = dict.fromkeys(ADVICE, 0.0)
        self._measured_since = 0.0

    def sync_weights(self, version: int) -> None:
        """Pause what runs with other weights, and give the engine those of ``version``. Collective."""
        if self._background is not None and self._version == version:
            return
        self.pause()
        self.timeline.change("weight sync")
        self.generator.driver.sync_weights(version)
        self.timeline.change("paused")

    def _generate(self, request: RolloutRequest, num_missing: int) -> list[list[Trajectory]]:
        """Generate until the groups of all engines are enough; others go on. A step that streams gets what is complete.

        Raises:
            RunError: An engine failed and cannot restart, has used up its restarts, or hangs in a call.
            StopRequested: The run is told to stop.
        """
        generator, version = self.generator, request.policy_version
        if request.prompts or version != self._version:
            self.pause()
        released = None
        while released is None:
            generator.driver.with_restarts(
                lambda: self._attempt(request, num_missing), lambda: self._num_unfinished, self.pause
            )
            released = self._release(num_missing, version)
        if self.awaits_groups:
            generator.driver.restore_trainer()
        else:
            generator.driver.finish()
            self._say_which_side_waits()
        return released

    @property
    def _num_unfinished(self) -> int:
        of_validation = 0 if self.held_out is None else self.held_out.num_unfinished
        return sum(each.finish_reason is None for each in self.all_trajectories) + of_validation

    def _attempt(self, request: RolloutRequest, num_missing: int) -> None:
        """Have the thread generate, unless it does, until enough groups are complete or an engine fails."""
        is_enough = self._is_enough(request, num_missing, f"asynchronous/{self._num_waits}")
        self._num_waits += 1
        if self._background is None:
            try:
                self._start(request)
            except EngineFault:
                is_enough.tell_failure()
                raise
        self._wait(is_enough, "wait_s")

    def _start(self, request: RolloutRequest) -> None:
        """Have the thread generate all groups with the policy's weights."""
        held_out, version = self.held_out, request.policy_version
        assert held_out is None or held_out.version == version, "its tokens are of one version"
        self._note_resumed()
        is_paused = threading.Event()

        def looks_at_pause() -> bool:
            self._seen_at = time.monotonic()
            return is_paused.is_set()

        trajectories, others = self.all_trajectories, dict[str, SamplingParams]()
        if held_out is not None:
            trajectories += held_out.trajectories
            others = {each.key: held_out.sampling for each in held_out.trajectories}
        step = GenerationStep(self.options, looks_at_pause, others, self.timeline.count, PhaseProgress())
        loop = self.generator.loop(trajectories, request, self._rules, step)
        assert isinstance(loop, StreamingLoop)
        with self.generator.driver.ready_engine(version) as engine:
            self._seen_at = time.monotonic()
            self._background = BackgroundGeneration(loop.stream, engine, is_paused)
        self.timeline.change("generating")
        self._version = version
        if self._idle_since is not None:
            self._add("engine_idle_s", time.monotonic() - self._idle_since)

    def _wait(self, is_enough: EnoughGroups, metric: str) -> None:
        """Wait for enough groups, or for the end of this rank's thread; raise the fault that ended it.

        Args:
            is_enough: Returns whether the groups are enough.
            metric: Name below ``partial/`` of the seconds that it takes.
        """
        began, background, engine = time.monotonic(), self._background, self.generator.driver.engine
        assert background is not None
        while background.is_running and not is_enough() and not engine.is_stopping():
            time.sleep(POLL_S)
            if time.monotonic() - self._seen_at > HUNG_S and background.is_running:
                raise RunError(
                    f"{type(engine).__name__} has not returned from submit, collect or abort for {HUNG_S:g} s. Resume "
                    "from the newest checkpoint with rlplug fit --resume."
                )
        is_enough()  # tells the other engines what came last
        self._add(metric, time.monotonic() - began)
        if background.fault is not None:
            is_enough.tell_failure()
            raise background.fault

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
            self.generator.driver.note_fault(background.fault)
            self._idle_since = background.ended_at

    def generate(self, request: RolloutRequest) -> list[Sample]:
        self.pause()
        return super().generate(request)

    # ---- a validation beside a step -------------------------------------------------------------------------------

    @property
    def has_held_out(self) -> bool:
        return self.held_out is not None

    def begin_held_out(self, request: RolloutRequest) -> None:
        """Let the next :meth:`next_groups` generate these prompts too; its version is that of ``request``."""
        groups = self.generator.share_of_engine(request)
        self.held_out = HeldOutRollout(groups, request.sampling, request.policy_version, len(request.prompts))

    def finish_held_out(self, num_samples: int) -> list[Sample] | None:
        held_out, self.held_out = self.held_out, None
        assert held_out is not None, "there is a validation, which the last step began"
        is_enough = EnoughGroups(
            own=held_out.complete,
            suffice=lambda complete: len(complete) == held_out.num_groups,
            complete_groups=self._complete_groups,
            wait_key=f"held out/{self._num_waits}",
        )
        self._num_waits += 1
        num_attempts = 0

        def wait() -> None:
            nonlocal num_attempts
            num_attempts += 1
            if num_attempts == 1:  # engines that restart get the policy's newest weights
                self._wait(is_enough, "validation_wait_s")

        self.generator.driver.with_restarts(wait, lambda: held_out.num_unfinished, self.pause)
        if num_attempts == 1:
            return self.generator.share_of_rank(held_out.groups)
        if self._rules.environments is not None:
            self._rules.environments.forget(held_out.trajectories)
        return None

    # ---- metrics --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            with contextlib.suppress(RunError):  # the engine is closed next
                background.pause()
        super().close()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of engine and environments, and the seconds that step and engine waited."""
        metrics, self._metrics = self._metrics, {}
        return super().pop_metrics() | metrics

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
