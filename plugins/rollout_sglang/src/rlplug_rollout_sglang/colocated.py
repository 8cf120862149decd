"""``SGLangRollout``: SGLang on the trainer's own GPUs, one engine per GPU or per tensor-parallel group of ranks."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any, ClassVar, Final

import torch
from rlplug_engines.colocated import (
    EngineProcess,
    EngineStats,
    FirstRankEngine,
    MemoryAdvice,
    MemoryBefore,
    StartedEngine,
)
from rlplug_engines.flat_buckets import flatten_bucket

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineMemory,
    EngineMemoryRequest,
    Placement,
    PolicySpec,
    SleepingPart,
)
from rlplug_rollout_sglang.engine_requests import SGLangRequests
from rlplug_rollout_sglang.fp8 import check_fp8
from rlplug_rollout_sglang.memory_plan import KV_MARGIN, PASS_BYTES, planned_memory
from rlplug_rollout_sglang.options import BESIDE_TRAINERS, CACHE_VARIABLES, SGLangOptions
from rlplug_rollout_sglang.sampling import SAMPLING_EXTRA
from rlplug_rollout_sglang.versions import require_sglang
from rlplug_rollout_sglang.weights import serialised

COMMAND: Final = (sys.executable, "-c", "from rlplug_rollout_sglang.host import main; main()")

CALL_DEADLINE_S: Final = 600.0
"""For each bucket of a weight sync, and to release or take memory."""

BLACKWELL: Final = 10
"""Its compute capability, from which DeepGEMM reads scales as powers of two alone."""

WAKING: Final[dict[SleepingPart, list[str]]] = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""SGLang's names for the memory of a part. CUDA graphs stay unless SGLANG_MEMORY_SAVER_CUDA_GRAPH is set."""

SHARE_MODEL: Final = "share the model between GPUs with rollout.tensor_parallel_size."


class SGLangRollout(FirstRankEngine):
    """Generates with SGLang on the trainer's own GPUs, in processes of its own.

    With ``tensor_parallel_size`` above 1, as many consecutive ranks share one engine, and no request can be submitted.

    Args:
        generate_deadline_s: A rollout that takes longer, or a request that was submitted, counts as a fault: its engine
            starts anew.
        start_deadline_s: Longest time for a start, in seconds; after it the engine starts anew.
        options: Those of :class:`rlplug_rollout_sglang.options.SGLangOptions`.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=True, sleep=True, restart=True, streaming=True, fp8_refit=True, multi_turn=True, tensor_parallel=True
    )

    compile_cache_variables = CACHE_VARIABLES
    sampling_extra = SAMPLING_EXTRA

    @classmethod
    def preference(cls, device_type: str) -> int:
        return 20 if device_type == "cuda" and find_spec("sglang") is not None else 0

    engine: ClassVar[str] = "SGLang"
    elsewhere: ClassVar[str] = "run servers of their own (SGLangServerRollout)"
    options: SGLangOptions

    def __init__(self, generate_deadline_s: float = 1800.0, start_deadline_s: float = 900.0, **options: Any) -> None:
        self.options = SGLangOptions(**options)
        longest_call_s = max(start_deadline_s, CALL_DEADLINE_S)
        super().__init__(self.options, not self.options.disable_radix_cache, generate_deadline_s, longest_call_s)
        self.start_deadline_s = start_deadline_s
        self._process: EngineProcess | None = None

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        return planned_memory(self.options, policy, needs)

    def check(self, policy: PolicySpec) -> None:
        check_fp8(type(self).__name__, policy, self.ranks_per_engine)

    # ---- start and close ------------------------------------------------------------------------------------------

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        if placement.device.type != "cuda":
            raise ConfigError(
                f"model.rollout is SGLangRollout, which needs a GPU, and the trainer runs on {placement.device}: use "
                "HFRollout or VLLMRollout there."
            )
        if policy.fp8 is not None and torch.cuda.get_device_capability(placement.device)[0] >= BLACKWELL:
            raise ConfigError(
                "model.weight_sync sends FP8 weights, and on this GPU SGLang changes the form of scales at its start "
                "and not after a sync: set model.weight_sync.dtype to null, or use VLLMRollout."
            )

    def launch(self, policy: PolicySpec, placement: Placement) -> StartedEngine:
        version, longest = require_sglang(), self.options.longest(policy)
        place = {"enable_memory_saver": True, "base_gpu_id": placement.device.index or 0}
        arguments = self.options.arguments(policy) | place
        about = self.ranks.from_first(lambda: self._make_process(arguments))
        check_cache(about["kv_cache_tokens"], longest)
        stats = EngineStats(
            max_num_seqs=about["max_num_seqs"],
            kv_cache_tokens=about["kv_cache_tokens"],
            keys=self.options.advice_keys(),
            max_num_batched_tokens=about["max_num_batched_tokens"],
            largest_graph=about["largest_graph"],
        )
        args = (policy, longest, stats, self.generate_deadline_s)
        return StartedEngine(str(version), stats, SGLangRequests(self._process, *args) if self._process else None)

    def _make_process(self, arguments: dict[str, Any]) -> dict[str, int]:
        shows_log = self.options.log_level != "error"
        environment, deadline_s = BESIDE_TRAINERS, self.start_deadline_s
        self._process = EngineProcess(self.engine, COMMAND, environment, arguments, deadline_s, shows_log)
        return self._process.about

    def memory_advice(self, memory: MemoryBefore, weight_bytes: int, longest: int) -> MemoryAdvice:
        share, asked = self.options.share, self.options.share * memory.free
        key = f"rollout.{self.options.written('mem_fraction_static')}"
        if weight_bytes + PASS_BYTES > memory.free:
            remedy = f"Free memory with model.memory.offload, or {SHARE_MODEL}"
        elif weight_bytes > 0.9 * asked:
            remedy = f"Raise {key}, or {SHARE_MODEL}"
        else:
            remedy = (
                f"If it ran out of memory: lower {key}, which leaves more for passes and CUDA "
                "graphs, or chunked_prefill_size, or cuda_graph_max_batch_size."
            )
        claims = {f"of that for {key} {share:g}": asked, "of that for weights": weight_bytes}
        return MemoryAdvice(claims, remedy)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()

    # ---- weights and memory ---------------------------------------------------------------------------------------

    def begin_sync(self) -> None:
        self._call("begin_update")

    def load_bucket(self, bucket: Bucket, version: int) -> None:
        flat, places = flatten_bucket(bucket)
        payloads = self.ranks.gathered(serialised(flat, places))
        self._call("update_weights", payloads, str(version))
        del flat  # it had to stay until now

    def abandon_sync(self) -> None:
        self._call("end_update")

    def finish_sync(self, version: int) -> None:
        self._call("end_update")
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # SGLang has let the buckets go

    def sleep(self) -> None:
        self._call("release")

    def wake(self, part: SleepingPart) -> None:
        self._call("resume", WAKING[part])

    def _call(self, name: str, *arguments: Any) -> None:
        def call() -> None:
            assert self._process is not None, "start comes first, and only the first rank has an engine"
            self._process.call(name, *arguments, deadline_s=CALL_DEADLINE_S)

        self.ranks.from_first(call)


def check_cache(kv_cache_tokens: int, longest: int) -> None:
    """Stop the run unless the KV cache holds the longest sequence: SGLang would cut completions short, and say nothing.

    Raises:
        RunError: It does not.
    """
    if kv_cache_tokens < longest + KV_MARGIN:
        raise RunError(
            f"SGLang has a KV cache of {kv_cache_tokens:,} tokens, and one sequence may need {longest + KV_MARGIN:,}: "
            "raise rollout.mem_fraction_static (or max_total_tokens), or lower context_length to the longest prompt "
            "and completion of the run."
        )
