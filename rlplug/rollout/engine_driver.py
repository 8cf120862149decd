"""Readies this rank's engine for each rollout: wake, weight sync, sleep, and restart after a fault."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from lightning.pytorch.utilities import rank_zero_info

from rlplug.distributed.offload import Offload
from rlplug.distributed.stop_signal import StopRequested
from rlplug.errors import RunError
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.engines import check_report, check_stats
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.rollout import EngineFault, Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket
from rlplug.rollout.engine_states import Call, EngineStateMachine
from rlplug.types import GIB, NO_VERSION
from rlplug.weight_sync.buckets import drain

OWN_COUNTERS: Final = frozenset({"restarts", "freed_gib", "sleep_seconds", "wake_seconds"})
"""Names under ``rollout/`` of what the driver measures itself."""


@dataclass(frozen=True)
class SyncedPolicy:
    """The policy whose weights an engine gets."""

    spec: PolicySpec
    """What the engine is told about it."""
    make_buckets: Callable[..., Iterator[Bucket]]
    """Returns the weights for a sync, as an iterator of buckets; collective. With ``spec.adapters`` it is called with
    ``has_frozen``, whether the engine has the frozen weights and gets the adapters alone."""
    hook: Any
    """The plugins' hooks; ``rlplug_sync_weights`` runs the weight sync."""


@dataclass(frozen=True)
class RankAgreement:
    """What the ranks decide together; by default there is one rank, which nobody stops."""

    any_rank: Callable[[bool], bool] = bool
    """Returns whether its argument is true on some rank; collective."""
    is_stopping: Callable[[], bool] = lambda: False
    """Returns whether the run is told to stop, as far as this rank knows; not collective."""
    agree_to_stop: Callable[[], bool] = lambda: False
    """Returns the same for all ranks; collective."""


class EngineDriver:
    """This rank's engine, with the version of the weights that it holds and the state that it is in.

    A rollout is :meth:`sync_weights`, then :meth:`with_restarts` around what generates with :meth:`ready_engine`, then
    :meth:`finish`. An engine that was restarted gets the weights again when it is readied again.

    Args:
        engine: A rollout engine that was not started yet; the constructor starts it.
        policy: The policy whose weights it gets.
        placement: This rank and its device.
        offload: Moves the trainer's state off the device while the engine generates.
        sleeps: Whether the engine gives its device memory back between rollouts.
        max_restarts: How many times one rollout may restart its engines after a fault.
        agreement: What the ranks decide together.
        note_asleep: Gets the bytes that the sleeping engine released and torch still counts, when they change.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: SyncedPolicy,
        placement: Placement,
        offload: Offload,
        sleeps: bool,
        max_restarts: int,
        agreement: RankAgreement = RankAgreement(),
        note_asleep: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.engine = engine
        engine.is_stopping = agreement.is_stopping
        self.spec = policy.spec
        self.placement, self._policy = placement, policy
        self._agreement, self._max_restarts = agreement, max_restarts
        self._sleeps, self._offload = sleeps, offload
        self._states = EngineStateMachine(type(engine).__name__, placement.device, note_asleep)
        self._version = NO_VERSION
        self._has_frozen = self._has_generated = False
        self._num_restarts = self._num_faults = 0
        """Of the run, and of the rollout that runs."""
        self._fault: EngineFault | None = None
        """What stopped the engine since it was ready, where nobody could restart it at once."""
        self._metrics: dict[str, float] = {}
        self._advised: set[str] = set()
        """Advice that was printed, without its numbers, which differ from step to step."""
        self._start()

    def sync_weights(self, version: int) -> None:
        """Wake the engine and send it the policy's weights, unless it has them; restart it after a fault. Collective.

        Raises:
            RunError: A weight is NaN or infinite and FP8 cannot represent it, or the engine cannot restart.
            StopRequested: The run is told to stop.
        """
        self.with_restarts(lambda: self._make_ready(version))

    def with_restarts(
        self,
        attempt: Callable[[], None],
        num_missing: Callable[[], int] = lambda: 0,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Call ``attempt`` until no rank's engine fails in it; restart the engines of all ranks in between. Collective.

        Args:
            attempt: Uses the engine, and raises ``EngineFault`` where it fails.
            num_missing: Returns how many requests of this rank must be generated again.
            pause: Breaks off what still uses the engine.

        Raises:
            RunError: An engine failed and cannot restart, or has used up its restarts.
            StopRequested: The run is told to stop; the engine sleeps, or is closed after a fault on any rank.
        """
        while True:
            fault = None
            try:
                attempt()
            except EngineFault as problem:
                fault = problem
            if self._agreement.agree_to_stop():
                pause()
                self._end_for_stop(fault)
                raise StopRequested
            if not self._agreement.any_rank(fault is not None):
                return
            pause()
            self._restart(fault, num_missing())

    @contextmanager
    def ready_engine(self, version: int) -> Iterator[RolloutEngine]:
        """Yield the engine ready to generate, with the weights of ``version``. Collective.

        They are sent only when the engine holds another version, or lost its weights in a restart or in its sleep.

        Raises:
            EngineFault: The engine failed, here or while the caller generated.
            RunError: A weight is NaN or infinite and FP8 cannot represent it; nothing was sent.
        """
        self._make_ready(version)
        with self._states.calls("generate"):
            yield self.engine

    def note_fault(self, fault: EngineFault | None) -> None:
        """Make what stopped the engine outside of an attempt the fault of the next :meth:`ready_engine`."""
        self._fault = fault or self._fault

    def _restart(self, fault: EngineFault | None, num_missing: int) -> None:
        """Restart the engines of all ranks, as some start together and each needs the next weight sync. Collective.

        A start that fails with ``EngineFault`` on any rank is the fault of the next :meth:`ready_engine` on all ranks.
        """
        self._num_faults += 1
        name, problem = type(self.engine).__name__, fault or "the engine of another rank failed"
        if not self.engine.capabilities.restart:
            raise RunError(
                f"{name} failed, and cannot start again in this process: {problem} Resume from the newest checkpoint "
                "with rlplug fit --resume."
            ) from fault
        if self._num_faults > self._max_restarts:
            raise RunError(
                f"{name} failed again after {self._max_restarts} restarts in one rollout: {problem} Resume from "
                "the newest checkpoint with rlplug fit --resume; model.limits.max_engine_restarts allows more."
            ) from fault
        if fault is not None:
            warnings.warn(f"{name} restarts, and {num_missing} requests are sent again: {problem}", stacklevel=3)
        self._num_restarts += 1
        self._version = NO_VERSION
        self.close()
        try:
            self._start()
            failed = None
        except EngineFault as again:
            failed = again
        has_failed = self._agreement.any_rank(failed is not None)
        self._fault = (failed or EngineFault(f"{name} of another rank did not start.")) if has_failed else None

    def _end_for_stop(self, fault: EngineFault | None) -> None:
        """Let the engine sleep; close it where it failed: a launcher's signal may have ended its processes too."""
        if self._agreement.any_rank(fault is not None):
            self.close()
            self._version = NO_VERSION
            self._offload.after_generation()
        else:
            self.finish()

    def finish(self) -> None:
        """End a rollout: let the engine sleep, and bring the trainer's weights back."""
        self._has_generated = True
        self._num_faults = 0
        self._sleep()
        self.restore_trainer()

    def restore_trainer(self) -> None:
        """Bring the trainer's weights back, for passes beside generation on other devices."""
        self._offload.after_generation()

    def pop_metrics(self) -> dict[str, float]:
        """Return ``sync/...`` and, after rollouts, the engine's ``rollout/...`` metrics since the last call.

        Collective. A step may have several rollouts, whose counters the engine adds up.
        """
        if self._has_generated:
            self._note_metrics()
        self._has_generated = False
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """Close the engine; safe to call twice."""
        self._has_frozen = self._has_generated = False
        with self._calls("close", "close"):
            self.engine.close()

    def _buckets(self) -> Iterator[Bucket]:
        """Return the buckets of the next sync. Collective: the engines of all ranks start together."""
        make = self._policy.make_buckets
        return make() if self.spec.adapters is None else make(has_frozen=self._has_frozen)

    @contextmanager
    def _calls(self, call: Call, method: str) -> Iterator[None]:
        """Make a call in the body, which must be legal, and must leave the process's state as it was."""
        with self._states.calls(call), watched(PluginCall(self.engine, method)):
            yield

    # ---- one rollout ----------------------------------------------------------------------------------------------

    def _make_ready(self, version: int) -> None:
        """Prepare the engine; after a fault every bucket is still gathered, so no other rank waits for this one."""
        needs_sync = self._version != version  # the same on all ranks
        buckets = self._buckets() if needs_sync else iter(())
        try:
            if self._fault is not None:
                raise self._fault
            self._prepare(buckets, version)
        except EngineFault:
            drain(buckets)
            raise

    def _prepare(self, buckets: Iterator[Bucket], version: int) -> None:
        """Wake the engine's weights, sync them, and wake its KV cache, as far as it needs each.

        The KV cache and the buckets of the sync are never on the device together. The trainer's state is offloaded
        before each of them takes memory.
        """
        self._offload.before_engine_wakes()
        if self._states.state == "asleep":
            with self._calls("wake_weights", "wake"):
                self.engine.wake("weights")
        if self._version != version:
            self._version = NO_VERSION
            call = PluginCall(self.engine, "update_weights")
            with self._calls("update_weights", "update_weights"):
                found = self._policy.hook.rlplug_sync_weights(engine=self.engine, buckets=buckets, version=version)
                if next(buckets, None) is not None:
                    drain(buckets)
                    raise call.violation("take all buckets of a weight sync", "left some of them")
                report = check_report(call, found, version)
            self._version, self._has_frozen = version, True
            self._metrics["sync/seconds"] = report.seconds
            self._metrics["sync/gib"] = report.num_bytes / GIB
            self._metrics["sync/buckets"] = float(report.num_buckets)
            self._metrics |= {f"sync/{name}_s": seconds for name, seconds in report.parts.items()}
        self._offload.before_generation()
        if self._states.state == "synced":
            with self._calls("wake_kv_cache", "wake"):
                self.engine.wake("kv_cache")

    def _sleep(self) -> None:
        if self._sleeps:
            with self._calls("sleep", "sleep"):
                self.engine.sleep()
            self._version = NO_VERSION  # sleep discards the weights: send them again
            self._metrics["rollout/freed_gib"] = self._states.freed_bytes / GIB
            self._metrics["rollout/sleep_seconds"] = self._states.seconds["sleep"]

    def _note_metrics(self) -> None:
        stats = check_stats(PluginCall(self.engine, "stats"), self.engine.stats(), OWN_COUNTERS)
        self._metrics |= {f"rollout/{name}": value for name, value in stats.items()}
        self._metrics["rollout/restarts"] = float(self._num_restarts)
        if self._sleeps:
            waking = self._states.seconds["wake_weights"] + self._states.seconds["wake_kv_cache"]
            self._metrics["rollout/wake_seconds"] = waking
        for advice in self.engine.advice():
            if (words := re.sub(r"[\d.,]*\d", "#", advice)) not in self._advised:
                self._advised.add(words)
                rank_zero_info(f"{type(self.engine).__name__}: {advice}")

    # ---- start and sleep ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the engine with the trainer's state offloaded, as it is in every rollout, and let it sleep."""
        self._offload.before_engine_wakes()
        self._offload.before_generation()
        with self._calls("start", "start"):
            self.engine.start(self.spec, self.placement)
        self._sleep()
        self._offload.after_generation()
