"""``TRTLLMRollout``: TensorRT-LLM on the trainer's own GPUs, one engine per GPU or per tensor-parallel group of ranks.

It was never run on TensorRT-LLM itself: a strict double stands in for it in the tests.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info

from rlplug.distributed.rng import preserved_rng
from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineFault,
    EngineMemory,
    EngineMemoryRequest,
    Placement,
    PolicySpec,
    RolloutEngine,
    SleepingPart,
    SyncReport,
)
from rlplug.rollout.engines import EngineRanks
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.fp8_engine_checks import check_fp8_fits
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator
from rlplug_rollout_trtllm.engine_host import EngineHost
from rlplug_rollout_trtllm.engine_loop import EngineLoop
from rlplug_rollout_trtllm.engine_requests import EngineRequests
from rlplug_rollout_trtllm.environment import engine_environment
from rlplug_rollout_trtllm.gpu import TrainerGPU, visible_devices
from rlplug_rollout_trtllm.memory import planned_memory, start_failure
from rlplug_rollout_trtllm.options import TRTLLMOptions, check_text_only
from rlplug_rollout_trtllm.placement import Bundles, PrivateRay
from rlplug_rollout_trtllm.stats import made_stats, seen_metrics
from rlplug_rollout_trtllm.versions import argument_names, require_tensorrt_llm
from rlplug_rollout_trtllm.weights import flattened, merged, serialised, tensors_of

CALL_DEADLINE_S: Final = 600.0
"""For each bucket of a weight sync, and to release or take memory."""
CLOSE_S: Final = 60.0


class PlacedRay(Protocol):
    """A Ray in which one engine has its place."""

    bundles: Bundles

    def close(self) -> None:
        """End it."""


class TRTLLMRollout(RolloutEngine):
    """Generates with TensorRT-LLM on the trainer's own GPUs, in workers of a Ray of its own.

    With ``model.sleep_between_rollouts`` the update has the memory that the engine takes. With
    ``tensor_parallel_size`` above 1, as many consecutive ranks share one engine, and no request can be submitted.

    Args:
        generate_deadline_s: A rollout that takes longer, or a request that was submitted, counts as a fault: its engine
            starts anew.
        start_deadline_s: The same for a start.
        options: Those of :class:`rlplug_rollout_trtllm.options.TRTLLMOptions`.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=True,
        sleep=True,
        restart=True,
        streaming=True,
        fp8_refit=True,
        multi_turn=True,
        tensor_parallel=True,
    )

    def __init__(self, generate_deadline_s: float = 1800.0, start_deadline_s: float = 1800.0, **options: Any) -> None:
        self.options = TRTLLMOptions(**options)
        self.generate_deadline_s = generate_deadline_s
        self.start_deadline_s = start_deadline_s
        self._seats: EngineRanks | None = None
        self._ray: PlacedRay | None = None
        self._loop: EngineLoop | None = None
        self._host: EngineHost | None = None
        self._is_asleep = False
        self.capabilities = replace(
            self.capabilities,
            streaming=self.options.tensor_parallel_size == 1,  # the first of the ranks alone has the requests
            multi_turn=self.options.enable_block_reuse,
        )

    @property
    def ranks_per_engine(self) -> int:
        return self.options.tensor_parallel_size

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        return planned_memory(self.options, policy, needs)

    def check(self, policy: PolicySpec) -> None:
        check_text_only(policy)
        check_fp8_fits(type(self).__name__, policy, self.options.tensor_parallel_size)

    # ---- what tests without a GPU replace -------------------------------------------------------------------------

    def make_gpu(self, device: torch.device) -> TrainerGPU:
        """Return the trainer's GPU."""
        return TrainerGPU(device)

    def make_ray(self, devices: str) -> PlacedRay:
        """Start a Ray for the engine's workers."""
        return PrivateRay(devices, self.ranks_per_engine, self.start_deadline_s)

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        began, size = time.perf_counter(), self.ranks_per_engine
        self._gpu = self.make_gpu(placement.device)
        if placement.world_size % size:
            raise ConfigError(
                f"rollout.tensor_parallel_size is {size}, and the trainer has {placement.world_size} ranks: give a "
                "divisor of that, or run engines on GPUs of their own (TRTLLMRayRollout)."
            )
        self._weights = policy_weights(policy)
        if self._seats is None:  # once: a restart finds the same ranks
            waiting_s = max(self.generate_deadline_s, self.start_deadline_s, CALL_DEADLINE_S) + 60
            self._seats = EngineRanks(placement, size, waiting_s)
        self._seats.check_devices("TensorRT-LLM", self._gpu.index)
        with engine_environment(), preserved_rng():
            require_tensorrt_llm()
            arguments = self.options.arguments(policy, argument_names())
            self._uuid = self._gpu.uuid()
        memory = self._gpu.memory()
        self._is_asleep = False
        try:
            version = self._seats.from_first(lambda: self._make_engine(arguments))
        except EngineFault as problem:
            self.close()
            num_bytes = sum(weight.num_bytes for weight in self._weights.values()) // size
            raise start_failure(str(problem), memory, self.options.free_gpu_memory_fraction, num_bytes) from problem
        except RunError:
            self.close()
            raise
        self._stats = made_stats(self.options)
        if self._loop is not None and self._host is not None:
            self._requests = EngineRequests(
                self._loop,
                [self._host],
                policy,
                self.options.longest(policy),
                self._stats,
                self.generate_deadline_s,
            )
        rank_zero_info(f"TensorRT-LLM {version}: started in {time.perf_counter() - began:.0f} s")

    def _make_engine(self, arguments: Mapping[str, Any]) -> str:
        devices = visible_devices(self._gpu.index, self.ranks_per_engine)
        ray = self._ray = self.make_ray(devices)
        loop, host = EngineLoop(), EngineHost()
        self._loop, self._host = loop, host
        with preserved_rng():
            bundles = ray.bundles
            started = host.start(arguments, [bundles.group], [bundles.indices], sleeps=True, devices=devices)
            return loop.run(started, "start", self.start_deadline_s)

    def close(self) -> None:
        host, self._host = self._host, None
        loop, self._loop = self._loop, None
        ray, self._ray = self._ray, None
        if loop is not None:
            if host is not None:
                with contextlib.suppress(EngineFault):  # what is left then ends with its Ray
                    loop.run(host.close(), "shutdown", CLOSE_S)
            loop.close()
        if ray is not None:
            ray.close()

    # ---- generation -----------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        return self._shared.from_first(lambda: self._requests.generate(requests, sampling))

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        if not self.capabilities.streaming:
            super().submit(requests, sampling)
        self._requests.submit(requests, sampling)

    def collect(self, timeout_s: float) -> list[Completion]:
        if not self.capabilities.streaming:
            super().collect(timeout_s)
        return self._requests.collect(timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        if not self.capabilities.streaming:
            super().abort(request_ids)
        self._requests.abort(request_ids)

    def stats(self) -> dict[str, float]:
        return self._shared.from_first(lambda: seen_metrics(self._stats))

    # ---- weights and memory ---------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """Take every weight. A sync that is refused, or breaks off, stays open in the engine: the next one ends it."""
        receipt = WeightSyncValidator(type(self).__name__, self._weights)
        self._shared.from_first(self._pause)
        try:
            for bucket in receipt.count(buckets):
                self._load(bucket)
            report = receipt.report(version)
        except EngineFault:
            raise
        except Exception:
            self._shared.from_first(self._go_on)
            raise
        self._shared.from_first(lambda: self._finish(version))
        self._gpu.collect_handles()
        return report

    def _load(self, bucket: Bucket) -> None:
        """Send one bucket: each rank has a copy on its own GPU, from which the engine's worker there reads it."""
        flat, slots = flattened(bucket)
        self._gpu.wait()
        payloads = self._shared.gathered({self._uuid: serialised(tensors_of(flat, slots), self._gpu.reduce)})
        self._shared.from_first(lambda: self._call("update_weights", self._running.update_weights(merged(payloads))))
        del flat  # it had to stay until now

    def _pause(self) -> None:
        self._requests.wait_until_idle()
        if not self._is_asleep:
            self._call("pause_generation", self._running.pause())

    def _finish(self, version: int) -> None:
        self._call("finalise weights", self._running.finish_update())
        if not self._is_asleep:  # what slept is empty
            self._call("reset_prefix_cache", self._running.forget())
        self._go_on()
        self._requests.version = version

    def _go_on(self) -> None:
        if not self._is_asleep:
            self._call("resume_generation", self._running.go_on())

    def sleep(self) -> None:
        self._shared.from_first(self._release)
        self._is_asleep = True

    def _release(self) -> None:
        self._requests.wait_until_idle()
        self._call("reset_prefix_cache", self._running.forget())  # memory goes, and what is known of it would stay
        self._call("release", self._running.release())

    def wake(self, part: SleepingPart) -> None:
        self._shared.from_first(lambda: self._call(f"resume {part}", self._running.resume(part)))
        if part == "kv_cache":
            self._is_asleep = False

    def _call(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None, "start comes first, and only the first seat has an engine"
        self._loop.run(work, name, CALL_DEADLINE_S)

    @property
    def _shared(self) -> EngineRanks:
        assert self._seats is not None, "start comes first"
        return self._seats

    @property
    def _running(self) -> EngineHost:
        assert self._host is not None, "start comes first, and only the first seat has an engine"
        return self._host
