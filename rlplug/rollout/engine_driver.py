"""Drives any engine through a rollout: wake, sync, play, sleep; and again after a fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from rlplug.distributed.offload import Offload
from rlplug.errors import RunError
from rlplug.interfaces.rollout import EngineFault, Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.engine_states import EngineStateMachine
from rlplug.types import GIB, NO_VERSION
from rlplug.weight_sync.buckets import weight_buckets
from rlplug.weight_sync.fp8_finite_check import check_finite


class EngineDriver:
    """Owns this rank's engine: what it holds, and whether it is awake.

    Args:
        engine: Not started yet.
        policy: The sharded model whose weights the engine gets.
        spec: The policy, as the engine is told of it.
        placement: This rank.
        hook: The plugins' hooks; ``rlplug_sync_weights`` runs the weight sync.
        sleeps: Give device memory back between rollouts.
        bucket_bytes: Size limit of the buckets in which weights travel.
        offload: What leaves the device meanwhile.
        any_rank: Returns whether its argument is true on some rank; collective.
        max_restarts: How often one rollout may start its engines anew after a fault.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: nn.Module,
        spec: PolicySpec,
        placement: Placement,
        hook: Any,
        sleeps: bool,
        bucket_bytes: int,
        offload: Offload,
        any_rank: Callable[[bool], bool],
        max_restarts: int,
    ) -> None:
        self.engine = engine
        self._policy = policy
        self._spec = spec
        self._placement = placement
        self._hook = hook
        self._sleeps = sleeps
        self._bucket_bytes = bucket_bytes
        self._offload = offload
        self._any_rank = any_rank
        self._max_restarts = max_restarts
        self._life = EngineStateMachine(type(engine).__name__, placement.device)
        self._version = NO_VERSION
        self._num_restarts = 0
        self._metrics: dict[str, float] = {}
        self._advised: set[str] = set()
        self._start()

    def play(self, loop: AgentLoop, version: int) -> None:
        """Let trajectories go on with the newest weights; after a fault on any rank, with engines started anew.

        Args:
            loop: Of this rank's trajectories.
            version: Of the policy; weights travel only when the engine holds others, or none after it slept.
        """
        num_faults = 0
        while True:
            fault = self._attempt(loop, version)
            if not self._any_rank(fault is not None):
                break
            num_faults += 1
            self._restart(fault, num_faults, len(loop.waiting))
        self._note_metrics()
        self._sleep()
        self._offload.after_generation()

    def pop_metrics(self) -> dict[str, float]:
        """Return ``sync/...`` and the engine's ``rollout/...`` metrics since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def asleep_bytes(self, since: float) -> int:
        """Return what the engine has given back, if it slept all the time since ``since``, of ``time.perf_counter``."""
        return self._life.freed_bytes if self._life.state == "asleep" and self._life.slept_at <= since else 0

    def close(self) -> None:
        """Close the engine; safe to call twice."""
        with self._life.calls("close"):
            self.engine.close()

    # ---- a rollout ------------------------------------------------------------------------------------------------

    def _attempt(self, loop: AgentLoop, version: int) -> EngineFault | None:
        """Return what stopped the engine before all was done."""
        needs_sync = self._version != version  # the same on all ranks
        buckets = self._buckets() if needs_sync else iter(())
        try:
            self._prepare(buckets, version)
            with self._life.calls("generate"):
                loop.play(self.engine)
        except EngineFault as problem:
            for _ in buckets:  # each is a collective operation, in which other ranks wait
                pass
            return problem
        return None

    def _buckets(self) -> Iterator[Bucket]:
        spec = self._spec
        if spec.fp8 is not None:
            check_finite(self._policy, spec.dtype, spec.fp8)
        return weight_buckets(self._policy, spec.dtype, self._bucket_bytes, spec.fp8)

    def _prepare(self, buckets: Iterator[Bucket], version: int) -> None:
        """Wake weights, sync, wake the KV cache, as far as the engine needs it.

        Never are both the KV cache and the sync's buckets on the device. The trainer's state makes room before each.
        """
        self._offload.before_engine_wakes()
        if self._life.state == "asleep":
            with self._life.calls("wake_weights"):
                self.engine.wake("weights")
        if self._version != version:
            self._version = NO_VERSION
            with self._life.calls("update_weights"):
                report = self._hook.rlplug_sync_weights(engine=self.engine, buckets=buckets, version=version)
            self._version = report.policy_version
            self._metrics["sync/seconds"] = report.seconds
            self._metrics["sync/gib"] = report.num_bytes / GIB
            self._metrics["sync/buckets"] = float(report.num_buckets)
        self._offload.before_generation()
        if self._life.state == "synced":
            with self._life.calls("wake_kv_cache"):
                self.engine.wake("kv_cache")

    def _sleep(self) -> None:
        if self._sleeps:
            with self._life.calls("sleep"):
                self.engine.sleep()
            self._version = NO_VERSION  # what slept must be sent again
            self._metrics["rollout/freed_gib"] = self._life.freed_bytes / GIB
            self._metrics["rollout/sleep_seconds"] = self._life.seconds["sleep"]

    def _note_metrics(self) -> None:
        self._metrics |= {f"rollout/{name}": value for name, value in self.engine.stats().items()}
        self._metrics["rollout/restarts"] = float(self._num_restarts)
        if self._sleeps:
            waking = self._life.seconds["wake_weights"] + self._life.seconds["wake_kv_cache"]
            self._metrics["rollout/wake_seconds"] = waking
        for advice in self.engine.advice():
            if advice not in self._advised:
                self._advised.add(advice)
                rank_zero_info(f"{type(self.engine).__name__}: {advice}")

    # ---- start and restart ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the engine where the trainer has made the room that it makes in every rollout."""
        self._offload.before_engine_wakes()
        self._offload.before_generation()
        with self._life.calls("start"):
            self.engine.start(self._spec, self._placement)
        self._sleep()
        self._offload.after_generation()

    def _restart(self, fault: EngineFault | None, num_faults: int, num_missing: int) -> None:
        """Start the engines of all ranks anew: some start together with others, and each needs the next sync."""
        name, problem = type(self.engine).__name__, fault or "the engine of another rank failed"
        if not self.engine.capabilities.restart:
            raise RunError(
                f"{name} failed, and cannot start again in this process: {problem} Go on from the newest checkpoint "
                "with rlplug fit --resume."
            ) from fault
        if num_faults > self._max_restarts:
            raise RunError(
                f"{name} failed again after {self._max_restarts} restarts in one rollout: {problem} The newest "
                "checkpoint is from before; model.max_engine_restarts allows more."
            ) from fault
        if fault is not None:
            warnings.warn(f"{name} starts anew, and {num_missing} requests follow again: {problem}", stacklevel=2)
        self._num_restarts += 1
        self._version = NO_VERSION
        self.close()
        self._start()
