"""``TRTLLMRollout``: TensorRT-LLM on the trainer's own GPUs, never run but over the double of the tests."""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from rlplug_engines.colocated import (
    EngineLoop,
    FirstRankEngine,
    MemoryAdvice,
    MemoryBefore,
    StartedEngine,
    preserved_rng,
)
from rlplug_engines.flat_buckets import flatten_bucket, tensors_of
from torch import Tensor

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineFault,
    EngineMemory,
    EngineMemoryRequest,
    Placement,
    PolicySpec,
    SleepingPart,
)
from rlplug_rollout_trtllm.engine_host import CLOSE_S, RESET, UNKNOWN_ARGUMENT, EngineHost, memory_tags
from rlplug_rollout_trtllm.environment import VERSIONS, engine_environment, visible_devices
from rlplug_rollout_trtllm.memory_plan import PASS_BYTES, planned_memory
from rlplug_rollout_trtllm.options import TRTLLMOptions, check_text_only
from rlplug_rollout_trtllm.placement import PrivateRay
from rlplug_rollout_trtllm.sampling import SAMPLING_EXTRA, TRTLLMRequests
from rlplug_rollout_trtllm.surface import argument_names

CALL_DEADLINE_S: Final = 600.0
"""For each bucket of a weight sync, and to release or take memory."""


class TRTLLMRollout(FirstRankEngine):
    """Generates with TensorRT-LLM on the trainer's own GPUs, in workers of a Ray of its own.

    With ``model.memory.sleep_between_rollouts`` the update has the memory that the engine takes. With
    ``tensor_parallel_size`` above 1, as many consecutive ranks share one engine, and no request can be submitted.

    Args:
        generate_deadline_s: A rollout that takes longer, or a request that was submitted, counts as a fault: its engine
            starts anew.
        start_deadline_s: Longest time for a start, in seconds; after it the engine starts anew.
        options: Those of :class:`rlplug_rollout_trtllm.options.TRTLLMOptions`.
    """

    engine = "TensorRT-LLM"
    elsewhere = "run engines on GPUs of their own (TRTLLMRayRollout)"
    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=True, sleep=True, restart=True, streaming=True, fp8_refit=True, multi_turn=True, tensor_parallel=True
    )
    sampling_extra = SAMPLING_EXTRA
    options: TRTLLMOptions
    requests: TRTLLMRequests

    def __init__(self, generate_deadline_s: float = 1800.0, start_deadline_s: float = 1800.0, **options: Any) -> None:
        self.options = TRTLLMOptions(**options)
        longest_call_s = max(start_deadline_s, CALL_DEADLINE_S)
        super().__init__(self.options, self.options.enable_block_reuse, generate_deadline_s, longest_call_s)
        self.start_deadline_s = start_deadline_s
        self._ray: PrivateRay | None = None
        self._loop: EngineLoop | None = None
        self._host: EngineHost | None = None
        self._is_asleep = False

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        return planned_memory(self.options, policy, needs)

    def check(self, policy: PolicySpec) -> None:
        check_text_only(policy)
        super().check(policy)

    # ---- the GPU, which tests without one replace -----------------------------------------------------------------

    def prepare(self, policy: PolicySpec, placement: Placement) -> None:
        if placement.device.type != "cuda":
            raise ConfigError(
                f"model.rollout is TRTLLMRollout, which needs a GPU, and the trainer runs on {placement.device}: use "
                "HFRollout or VLLMRollout there."
            )

    def make_ray(self, devices: str) -> PrivateRay:
        """Start a Ray for the engine's workers."""
        return PrivateRay(devices, self.ranks_per_engine, self.start_deadline_s)

    def handle(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """Return a handle to a tensor for another process on the same GPU."""
        from torch.multiprocessing.reductions import reduce_tensor

        return reduce_tensor(tensor)  # type: ignore[no-any-return, no-untyped-call]

    def wait_for_copy(self, device: torch.device) -> None:
        """Wait until all that was written is there."""
        torch.cuda.current_stream(device).synchronize()

    def collect_handles(self) -> None:
        """Free what other processes have let go."""
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    # ---- start and close ------------------------------------------------------------------------------------------

    def launch(self, policy: PolicySpec, placement: Placement) -> StartedEngine:
        index = placement.device.index or 0
        with engine_environment(), preserved_rng():
            VERSIONS.require_module("tensorrt_llm")
            from tensorrt_llm._torch.utils import get_device_uuid

            arguments = self.options.arguments(policy, argument_names())
            self._uuid = str(get_device_uuid(index))  # by it the engine's workers know the GPU
        self._is_asleep = False
        version = self.ranks.from_first(lambda: self._make_engine(arguments, index))
        stats, longest = self.options.stats(), self.options.longest(policy)
        if self._loop is None or self._host is None:
            return StartedEngine(version, stats, None)
        requests = TRTLLMRequests(self._loop, [self._host], policy, longest, stats, self.generate_deadline_s)
        return StartedEngine(version, stats, requests)

    def _make_engine(self, arguments: Mapping[str, Any], index: int) -> str:
        devices = visible_devices(index, self.ranks_per_engine)
        ray = self._ray = self.make_ray(devices)
        self._loop, self._host = loop, host = EngineLoop(self.engine), EngineHost()
        with preserved_rng():
            started = host.start(arguments, ray.bundles, sleeps=True, devices=devices)
            (version,) = loop.run_all([started], "start", self.start_deadline_s)
        return version

    def memory_advice(self, memory: MemoryBefore, weight_bytes: int, longest: int) -> MemoryAdvice:
        free, share = memory.free, self.options.share
        names = map(self.options.written, ("free_gpu_memory_fraction", "max_batch_size", "max_num_tokens"))
        share_key, batch, passes = names
        key = f"at most, of what they leave, for rollout.{share_key} {share:g}"
        claims = {"of that for weights": weight_bytes, key: share * max(0, free - weight_bytes)}
        lower = f"lower rollout.{share_key}, {batch} or {passes}."
        remedy = f"If it ran out of memory: {lower} {UNKNOWN_ARGUMENT}"
        if weight_bytes + PASS_BYTES > free:
            remedy = "Free memory with model.memory.offload, or share the model between GPUs with tensor_parallel_size."
        return MemoryAdvice(claims, remedy)

    def close(self) -> None:
        if self._loop is not None and self._host is not None:
            with contextlib.suppress(EngineFault):  # what is left then ends with its Ray
                self._loop.run_all([self._host.close()], "shutdown", CLOSE_S)
        for part in (self._loop, self._ray):
            if part is not None:
                part.close()
        self._loop = self._host = self._ray = None

    # ---- weights and memory ---------------------------------------------------------------------------------------

    def begin_sync(self) -> None:
        self._on_first(*self._if_awake("pause_generation"), waits=True)

    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Send one bucket: each rank has a copy on its own GPU, from which the engine's worker there reads it."""
        flat, places = flatten_bucket(bucket)
        self.wait_for_copy(flat.device)
        payloads = self.ranks.gathered({self._uuid: serialised(tensors_of(flat, places), self.handle)})
        self.ranks.from_first(lambda: self._call("update_weights", merged(payloads)))
        del flat  # it had to stay until now

    def abandon_sync(self) -> None:
        """Leave the sync open in the engine: the next one ends it."""
        self._on_first(*self._if_awake("resume_generation"))

    def finish_sync(self, version: int) -> None:
        self._on_first(("update_weights", None), *self._if_awake(RESET, "resume_generation"))
        self.collect_handles()

    def sleep(self) -> None:
        self._on_first(RESET, ("release", memory_tags()), waits=True)  # what is known of the memory would stay
        self._is_asleep = True

    def wake(self, part: SleepingPart) -> None:
        self._on_first(("resume", memory_tags(part)))
        self._is_asleep = part != "kv_cache"

    def _if_awake(self, *calls: Any) -> tuple[Any, ...]:
        """Return calls that an engine which sleeps does not need: it has no requests, and its cache is empty."""
        return () if self._is_asleep else calls

    def _on_first(self, *calls: Any, waits: bool = False) -> None:
        """Make calls on the rank that has the engine, names or tuples with arguments; ``waits`` for requests before."""

        def make() -> None:
            if waits:
                self.requests.wait_until_idle()
            for call in calls:
                self._call(*([call] if isinstance(call, str) else call))

        self.ranks.from_first(make)

    def _call(self, method: str, *arguments: Any) -> None:
        assert self._loop is not None, "start comes first, and only the first rank has an engine"
        assert self._host is not None
        self._loop.run_all([self._host.call(method, *arguments)], method, CALL_DEADLINE_S)


def serialised(named: Iterable[tuple[str, Tensor]], reduce: Callable[[Tensor], Any]) -> str:
    """Return handles to tensors, which must stay as they are until the engine's workers have read them.

    ``reduce`` returns what makes a tensor again: globals of torch and plain values, as workers un-pickle nothing else.
    """
    return base64.b64encode(pickle.dumps([(name, reduce(tensor)) for name, tensor in named])).decode("ascii")


def merged(payloads: Iterable[dict[str, str]]) -> dict[str, str]:
    """Return the payloads of an engine's GPUs as one, by UUID; ``RunError`` when two are of the same GPU."""
    together: dict[str, str] = {}
    for payload in payloads:
        if shared := together.keys() & payload.keys():
            raise RunError(f"two ranks that share an engine train on the same GPU, {min(shared)}.")
        together |= payload
    return together
