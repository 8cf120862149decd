"""``VLLMRollout``: vLLM in the trainer's process, one engine per GPU or per tensor-parallel group of ranks."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from rlplug.distributed.rng import preserved_rng
from rlplug.errors import ConfigError
from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineMemory,
    EngineMemoryRequest,
    Placement,
    PolicySpec,
    RolloutEngine,
    SleepingPart,
    SyncReport,
)
from rlplug.rollout.engines import EngineStats, MemoryBefore
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.fp8_engine_checks import check_fp8_fits
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator
from rlplug_rollout_vllm.engine_requests import EngineRequests
from rlplug_rollout_vllm.memory import planned_memory, start_failure
from rlplug_rollout_vllm.options import VLLMOptions
from rlplug_rollout_vllm.versions import require_vllm
from rlplug_rollout_vllm.weights import load_weights


class VLLMRollout(RolloutEngine):
    """Generates with vLLM on the trainer's own devices.

    With ``model.sleep_between_rollouts`` the update has the memory that the engine takes (CUDA only). With
    ``tensor_parallel_size`` above 1, as many consecutive ranks run one engine together.

    What was submitted runs while ``collect`` or ``generate`` is called, and at no other time.

    Args:
        generate_deadline_s: For a rollout, or for a request that was submitted: when the engine works longer on it,
            that counts as a fault, and it starts anew. Looked at between vLLM's steps; what hangs inside one is
            reported by ``model.stall_s``.
        options: Those of :class:`rlplug_rollout_vllm.options.VLLMOptions`.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=True,
        sleep=torch.cuda.is_available(),
        restart=not torch.cuda.is_available(),  # its allocator for sleep serves one engine in a process
        streaming=True,
        fp8_refit=torch.cuda.is_available(),  # on CPUs its kernels need AMX
        multi_turn=True,
        tensor_parallel=True,
    )

    def __init__(self, generate_deadline_s: float = 1800.0, **options: Any) -> None:
        self.options = VLLMOptions(**options)
        self.generate_deadline_s = generate_deadline_s
        self._engine: Any = None
        self._is_asleep = False
        self._shares_group = False
        self.capabilities = replace(
            self.capabilities,
            streaming=self.options.tensor_parallel_size == 1,  # ranks that share an engine step together
            multi_turn=self.options.enable_prefix_caching is not False,
        )

    @property
    def ranks_per_engine(self) -> int:
        return self.options.tensor_parallel_size

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        return planned_memory(self.options, policy, needs)

    def check(self, policy: PolicySpec) -> None:
        check_fp8_fits(type(self).__name__, policy, self.ranks_per_engine)

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        began, size = time.perf_counter(), self.ranks_per_engine
        if placement.world_size % size:
            raise ConfigError(
                f"rollout.tensor_parallel_size is {size}, and the trainer has {placement.world_size} ranks: give a "
                "divisor of that, or run servers of their own (VLLMServerRollout)."
            )
        self._device = placement.device
        self._weights = policy_weights(policy)
        memory = MemoryBefore.of(placement.device) if placement.device.type == "cuda" else None
        with _process_for_vllm(placement):
            version = require_vllm()
            arguments = self.options.arguments(policy, placement.device)
            arguments["enable_sleep_mode"] = placement.device.type == "cuda"
            self._shares_group = dist.is_initialized()
            if self._shares_group:
                arguments["distributed_executor_backend"] = "external_launcher"
            try:
                self._engine = _make_engine(arguments, self._observe)
            except (AssertionError, RuntimeError, ValueError) as problem:
                num_bytes = sum(weight.num_bytes for weight in self._weights.values()) // size
                share, longest = self.options.gpu_memory_utilization, arguments["max_model_len"]
                raise start_failure(problem, memory, share, num_bytes, longest) from problem
        (self._model,) = self._engine.apply_model(lambda model: model)
        config = self._engine.vllm_config
        self._stats = EngineStats(
            max_num_seqs=config.scheduler_config.max_num_seqs,
            kv_cache_tokens=(config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
        )
        self._requests = EngineRequests(
            self._engine, policy, config.model_config.max_model_len, self._stats, self.generate_deadline_s
        )
        rank_zero_info(
            f"vLLM {version}: up to {self._stats.max_num_seqs} requests at once, a KV cache of "
            f"{self._stats.kv_cache_tokens:,} tokens; started in {time.perf_counter() - began:.0f} s"
        )

    def close(self) -> None:
        engine, self._engine, self._model = self._engine, None, None
        if engine is not None and not self._is_asleep:  # vLLM would free what slept a second time
            with _default_group_kept() if self._shares_group else contextlib.nullcontext():
                engine.engine_core.shutdown()

    # ---- generation -----------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        return self._requests.generate(requests, sampling)

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._streaming().submit(requests, sampling)

    def collect(self, timeout_s: float) -> list[Completion]:
        return self._streaming().collect(timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._streaming().abort(request_ids)

    def _streaming(self) -> EngineRequests:
        if not self.capabilities.streaming:
            raise self._cannot("streaming")
        return self._requests

    def _observe(self, running: int, waiting: int, kv_cache_use: float, preemptions: int) -> None:
        self._stats.observe(running, waiting, kv_cache_use)
        self._stats.preemptions += preemptions

    def stats(self) -> dict[str, float]:
        return self._stats.drain()

    def advice(self) -> list[str]:
        return self._stats.advice()

    # ---- weights and memory ---------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        receipt = WeightSyncValidator(type(self).__name__, self._weights)
        load_weights(self._model, self._engine.vllm_config, receipt.count(buckets))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._requests.start_version(version)
        return receipt.report(version)

    def sleep(self) -> None:
        if not self.capabilities.sleep:
            super().sleep()
        self._engine.sleep(level=2)
        self._is_asleep = True

    def wake(self, part: SleepingPart) -> None:
        if not self.capabilities.sleep:
            super().wake(part)
        self._engine.wake_up(tags=[part])
        self._is_asleep = False


def _make_engine(arguments: dict[str, Any], observe: Callable[[int, int, float, int], None]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(**arguments),
        usage_context=UsageContext.LLM_CLASS,  # it decides on defaults: vLLM's for many requests at once
        stat_loggers=[lambda *_: _Observer(observe)],
        enable_multiprocessing=False,
    )


class _Observer:
    """What vLLM calls a stat logger: hands on what :class:`EngineStats` counts, after every step."""

    def __init__(self, observe: Callable[[int, int, float, int], None]) -> None:
        self._observe = observe

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self._observe(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
                iteration_stats.num_preempted_reqs if iteration_stats is not None else 0,
            )

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _process_for_vllm(placement: Placement) -> Iterator[None]:
    """Have the environment in which vLLM starts as a part of the trainer, and leave the trainer's own as it was."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of much that is meant, such as the dummy weights
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it cannot seed requests, and compiles at every start
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the threads are the trainer's too
    needed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.device.index or 0),
        "WORLD_SIZE": str(placement.world_size),
    }
    former = {name: os.environ.get(name) for name in needed}
    os.environ.update(needed)
    try:
        with preserved_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
            yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _default_group_kept() -> Iterator[None]:
    """Keep vLLM, which destroys all process groups when it stops, from destroying the trainer's."""
    destroy = dist.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    dist.destroy_process_group = destroy_others
    try:
        yield
    finally:
        dist.destroy_process_group = destroy
