"""``SGLangRollout``: SGLang on the trainer's own GPUs, one engine per GPU or per tensor-parallel group of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info

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
from rlplug.rollout.engines import EngineRanks, EngineStats, MemoryBefore
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator
from rlplug_rollout_sglang.engine_process import EngineProcess
from rlplug_rollout_sglang.engine_requests import EngineRequests
from rlplug_rollout_sglang.fp8 import check_fp8
from rlplug_rollout_sglang.memory import check_cache, planned_memory, start_failure
from rlplug_rollout_sglang.options import SGLangOptions
from rlplug_rollout_sglang.versions import require_sglang
from rlplug_rollout_sglang.weights import flattened, serialised

CALL_DEADLINE_S: Final = 600.0
"""For each bucket of a weight sync, and to release or take memory."""

BLACKWELL: Final = 10
"""Its compute capability, from which DeepGEMM reads scales as powers of two alone."""

WAKING: Final[dict[SleepingPart, list[str]]] = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""SGLang's names for the memory of a part. CUDA graphs stay unless SGLANG_MEMORY_SAVER_CUDA_GRAPH is set."""


class SGLangRollout(RolloutEngine):
    """Generates with SGLang on the trainer's own GPUs, in processes of its own.

    With ``model.sleep_between_rollouts`` the update has the memory that the engine takes. With
    ``tensor_parallel_size`` above 1, as many consecutive ranks share one engine, and no request can be submitted.

    Args:
        generate_deadline_s: A rollout that takes longer, or a request that was submitted, counts as a fault: its engine
            starts anew.
        start_deadline_s: The same for a start.
        options: Those of :class:`rlplug_rollout_sglang.options.SGLangOptions`.
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

    def __init__(self, generate_deadline_s: float = 1800.0, start_deadline_s: float = 900.0, **options: Any) -> None:
        self.options = SGLangOptions(**options)
        self.generate_deadline_s = generate_deadline_s
        self.start_deadline_s = start_deadline_s
        self._seats: EngineRanks | None = None
        self._process: EngineProcess | None = None
        self.capabilities = replace(
            self.capabilities,
            streaming=self.options.tensor_parallel_size == 1,  # the first of the ranks alone has the requests
            multi_turn=not self.options.disable_radix_cache,
        )

    @property
    def ranks_per_engine(self) -> int:
        return self.options.tensor_parallel_size

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        return planned_memory(self.options, policy, needs)

    def check(self, policy: PolicySpec) -> None:
        check_fp8(type(self).__name__, policy, self.ranks_per_engine)

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        began, size = time.perf_counter(), self.ranks_per_engine
        if placement.device.type != "cuda":
            raise ConfigError(
                f"model.rollout is SGLangRollout, which needs a GPU, and the trainer runs on {placement.device}: use "
                "HFRollout or VLLMRollout there."
            )
        if policy.fp8 is not None and torch.cuda.get_device_capability(placement.device)[0] >= BLACKWELL:
            raise ConfigError(
                "model.weight_sync sends FP8 weights, and on this GPU SGLang changes the form of scales at its start "
                "and not after a sync: set model.weight_sync.transform to null, or use VLLMRollout."
            )
        if placement.world_size % size:
            raise ConfigError(
                f"rollout.tensor_parallel_size is {size}, and the trainer has {placement.world_size} ranks: give a "
                "divisor of that, or run servers of their own (SGLangServerRollout)."
            )
        version, self._weights = require_sglang(), policy_weights(policy)
        index = placement.device.index or 0
        if self._seats is None:  # once: a restart finds the same ranks
            waiting_s = max(self.generate_deadline_s, self.start_deadline_s, CALL_DEADLINE_S) + 60
            self._seats = EngineRanks(placement, size, waiting_s)
        self._seats.check_devices("SGLang", index)
        arguments = self.options.arguments(policy) | {"enable_memory_saver": True, "base_gpu_id": index}
        memory = MemoryBefore.of(placement.device)
        try:
            about = self._seats.from_first(lambda: self._make_process(arguments))
            check_cache(about["kv_cache_tokens"], self.options.longest(policy))
        except EngineFault as problem:
            num_bytes = sum(weight.num_bytes for weight in self._weights.values()) // size
            raise start_failure(str(problem), memory, self.options.mem_fraction_static, num_bytes) from problem
        except RunError:
            self.close()
            raise
        self._stats = EngineStats(
            max_num_seqs=about["seats"],
            kv_cache_tokens=about["kv_cache_tokens"],
            max_num_seqs_key="rollout.max_running_requests",
            memory_key="rollout.mem_fraction_static (or max_total_tokens)",
        )
        if self._process is not None:
            self._requests = EngineRequests(
                self._process, policy, self.options.longest(policy), self._stats, self.generate_deadline_s
            )
        rank_zero_info(
            f"SGLang {version}: up to {about['seats']} requests at once, a KV cache of {about['kv_cache_tokens']:,} "
            f"tokens; started in {time.perf_counter() - began:.0f} s"
        )

    def _make_process(self, arguments: dict[str, Any]) -> dict[str, int]:
        self._process = EngineProcess(arguments, self.start_deadline_s, shows_log=self.options.log_level != "error")
        return self._process.about

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

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
        return self._shared.from_first(self._stats.drain)

    def advice(self) -> list[str]:
        return self._stats.advice()

    # ---- weights and memory ---------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        receipt = WeightSyncValidator(type(self).__name__, self._weights)
        self._call("begin_update")
        try:
            for bucket in receipt.count(buckets):
                self._load(bucket, version)
        except EngineFault:
            raise
        except Exception:
            self._call("end_update")  # so that another sync may begin
            raise
        self._call("end_update")
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # SGLang has let the buckets go
        report = receipt.report(version)
        if self._process is not None:
            self._requests.version = version
        return report

    def _load(self, bucket: Bucket, version: int) -> None:
        """Send one bucket: each rank has it on its own GPU, from which the engine's process there reads it."""
        flat, entries = flattened(bucket)
        payloads = self._shared.gathered(serialised(flat, entries))
        self._call("update_weights", payloads, str(version))
        del flat  # it had to stay until now

    def sleep(self) -> None:
        self._call("release")

    def wake(self, part: SleepingPart) -> None:
        self._call("resume", WAKING[part])

    def _call(self, name: str, *arguments: Any) -> None:
        self._shared.from_first(lambda: self._running.call(name, *arguments, deadline_s=CALL_DEADLINE_S))

    @property
    def _shared(self) -> EngineRanks:
        assert self._seats is not None, "start comes first"
        return self._seats

    @property
    def _running(self) -> EngineProcess:
        assert self._process is not None, "start comes first, and only the first seat has an engine"
        return self._process
