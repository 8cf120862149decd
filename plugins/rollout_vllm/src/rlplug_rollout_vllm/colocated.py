"""``VLLMRollout``: vLLM in the trainer's process, one engine per GPU or per tensor-parallel group of ranks."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rlplug_engines.colocated import (
    ColocatedEngine,
    EngineStats,
    MemoryAdvice,
    MemoryBefore,
    StartedEngine,
    environment_variables,
    preserved_rng,
    process_kept,
)
from torch import Tensor

from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineFault,
    EngineMemory,
    EngineMemoryRequest,
    Placement,
    PolicySpec,
    SleepingPart,
    SyncReport,
)
from rlplug_rollout_vllm.adapters import ServedAdapters, plain_layers
from rlplug_rollout_vllm.engine_requests import SAMPLING_EXTRA, VLLMRequests
from rlplug_rollout_vllm.memory_plan import planned_memory
from rlplug_rollout_vllm.options import CACHE_VARIABLES, VERSIONS, VLLMOptions, scale_variables
from rlplug_rollout_vllm.weights import forget, load_weights


class VLLMRollout(ColocatedEngine):
    """Generates with vLLM on the trainer's own devices, as ``docs/rollout-engines.md`` says.

    Args:
        generate_deadline_s: For a rollout, or for a request that was submitted: when the engine works longer on it,
            that counts as a fault, and it starts anew. Looked at between vLLM's steps; what hangs inside one is
            reported by ``model.limits.stall_s``.
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
        routed_experts=torch.cuda.is_available(),  # vLLM 0.32 records them in a model runner that CPUs have not
        adapters=True,
        stop_strings=True,
    )

    compile_cache_variables = CACHE_VARIABLES
    sampling_extra = SAMPLING_EXTRA

    @classmethod
    def preference(cls, device_type: str) -> int:
        return 30 if device_type == "cuda" and find_spec("vllm") is not None else 0

    engine: ClassVar[str] = "vLLM"
    elsewhere: ClassVar[str] = "run servers of their own (VLLMServerRollout)"
    options: VLLMOptions
    _requests: VLLMRequests | None

    def __init__(self, generate_deadline_s: float = 1800.0, **options: Any) -> None:
        self.options = VLLMOptions(**options)
        super().__init__(self.options, self.options.enable_prefix_caching is not False, generate_deadline_s)
        self._engine: Any = None
        self._model: Any = None
        self._adapters: ServedAdapters | None = None
        self._is_asleep = False
        self._shares_group = False

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        VERSIONS.require_installed("vllm")

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        return planned_memory(self.options, policy, needs)

    def launch(self, policy: PolicySpec, placement: Placement) -> StartedEngine:
        with _process_for_vllm(policy, placement):
            version = VERSIONS.require_module("vllm")
            arguments = self.options.arguments(policy, placement.device)
            arguments["enable_sleep_mode"] = placement.device.type == "cuda"
            self._shares_group = dist.is_initialized()
            if self._shares_group:
                arguments["distributed_executor_backend"] = "external_launcher"
            _import_model(policy.path)
            try:
                self._engine = _make_engine(arguments, self._observe)
            except (AssertionError, RuntimeError, ValueError) as problem:
                raise EngineFault(f"{type(problem).__name__}: {problem}") from problem
        (self._model,) = self._engine.apply_model(lambda model: model)
        if policy.adapters is not None:
            self._adapters = ServedAdapters(policy.adapters, self._engine, self._model)
        config, cache = self._engine.vllm_config, self._engine.vllm_config.cache_config
        kv_cache_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
        stats = EngineStats(
            config.scheduler_config.max_num_seqs,
            kv_cache_tokens,
            self.options.advice_keys(placement.device.type == "cuda"),
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            largest_graph=config.compilation_config.max_cudagraph_capture_size or 0,  # 0 without graphs, None on a CPU
        )
        longest = config.model_config.max_model_len
        requests = VLLMRequests(self._engine, policy, longest, stats, self.generate_deadline_s)
        return StartedEngine(str(version), stats, requests)

    def memory_advice(self, memory: MemoryBefore, weight_bytes: int, longest: int) -> MemoryAdvice:
        share = self.options.gpu_memory_utilization
        asked = share * memory.total
        if asked > memory.free:
            fits = int(100 * memory.free / memory.total) / 100
            remedy = (
                f"Set rollout.gpu_memory_utilization to {fits:g} or less, or free memory with model.memory.offload."
            )
        elif weight_bytes > 0.9 * asked:
            remedy = "Raise rollout.gpu_memory_utilization, or share the model between GPUs with tensor_parallel_size."
        else:
            remedy = (
                f"The KV cache must hold one sequence of rollout.max_model_len {longest}: lower that to the longest "
                "prompt and completion of the run, raise gpu_memory_utilization, or lower max_num_batched_tokens."
            )
        claims = {f"asked for by rollout.gpu_memory_utilization {share:g}": asked, "of that for weights": weight_bytes}
        return MemoryAdvice(claims, remedy)

    def close(self) -> None:
        if self._model is not None:
            forget(self._model)
        engine, self._engine, self._model, self._adapters = self._engine, None, None, None
        if engine is not None and not self._is_asleep:  # vLLM would free what slept a second time
            with _default_group_kept() if self._shares_group else contextlib.nullcontext():
                engine.engine_core.shutdown()

    def _observe(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        """Take what vLLM gives its stat loggers after every step."""
        if scheduler_stats is not None:
            running, waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            self._stats.observe(running, waiting, scheduler_stats.kv_cache_usage)
        if scheduler_stats is not None and iteration_stats is not None:
            self._stats.preemptions += iteration_stats.num_preempted_reqs

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        validator = self.validator(None if self._adapters is None else self._adapters.expected(self._weights))
        checked = validator.count(buckets)
        if self._adapters is None:
            load_weights(self._model, self._engine.vllm_config, checked)
        else:
            received: dict[str, Tensor] = {}
            self._load_frozen(self._adapters, self._adapters.without(checked, received))
            validator.require_all()
            self._adapters.replace(received)
        if self._placement.device.type == "cuda":
            torch.cuda.synchronize(self._placement.device)
        assert isinstance(self._requests, VLLMRequests), "start comes first"
        self._requests.start_version(version, None if self._adapters is None else self._adapters.request)
        return validator.report(version)

    def _load_frozen(self, adapters: ServedAdapters, buckets: Iterable[Bucket]) -> None:
        if adapters.has_frozen:
            assert not list(buckets), "the validator expects adapters alone"
            return
        with plain_layers(self._model):
            load_weights(self._model, self._engine.vllm_config, buckets)

    def sleep(self) -> None:
        if not self.capabilities.sleep:
            super().sleep()
        # level 1 keeps the weights in host memory, level 2 drops them: a sync of adapters does not bring them again
        self._engine.sleep(level=1 if self._adapters is not None and self._adapters.has_frozen else 2)
        self._is_asleep = True

    def wake(self, part: SleepingPart) -> None:
        if not self.capabilities.sleep:
            super().wake(part)
        self._engine.wake_up(tags=[part])
        self._is_asleep = False


def _import_model(path: str) -> None:
    """Import vLLM's class of the policy, and let vLLM look at it here.

    With an empty cache vLLM looks at it in a process of its own, which imports all of vLLM again, to leave CUDA alone
    in this one; the trainer has initialized it already. What cannot be imported stays as it is, and vLLM reports it.
    """
    from transformers import PretrainedConfig
    from vllm import ModelRegistry

    for architecture in PretrainedConfig.get_config_dict(path)[0].get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        with contextlib.suppress(Exception):
            if known is not None:
                ModelRegistry.register_model(architecture, known.load_model_cls())


def _make_engine(arguments: dict[str, Any], observe: Callable[..., None]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    def ignore(*_: Any) -> None: ...

    logger = SimpleNamespace(record=observe, log=ignore, log_engine_initialized=ignore, record_sleep_state=ignore)
    return LLMEngine.from_engine_args(
        EngineArgs(**arguments),
        usage_context=UsageContext.LLM_CLASS,  # it decides on defaults: vLLM's for many requests at once
        stat_loggers=[lambda *_: logger],
        enable_multiprocessing=False,
    )


@contextlib.contextmanager
def _process_for_vllm(policy: PolicySpec, placement: Placement) -> Iterator[None]:
    """Have the environment in which vLLM starts as a part of the trainer, and leave the trainer's own as it was."""
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of much that is meant, such as the dummy weights
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot seed requests, and compiles at every start
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are the trainer's too
        "VLLM_DIST_IDENT": None,  # its workers on CPUs set it, for their own start
        **scale_variables(policy, placement.device),
    }
    needed = {name: os.environ.get(name, value) for name, value in wanted.items()} | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.device.index or 0),
        "WORLD_SIZE": str(placement.world_size),
    }
    with process_kept(), environment_variables(needed), preserved_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        yield


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
