"""``TRTLLMRayRollout``: TensorRT-LLM on GPUs of a Ray cluster, never run but over the double and a stand-in for Ray."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info
from rlplug_engines.colocated import EngineLoop, EngineRanks, TrackedEngine, preserved_rng
from rlplug_engines.servers import TensorList, WeightSender
from rlplug_engines.servers.process_group import Group, Rendezvous, SendGroup

from rlplug.errors import ConfigError, RLPlugError, RunError
from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineFault,
    EngineMemoryRequest,
    Placement,
    PolicySpec,
    SyncReport,
)
from rlplug.weight_sync.manifest import policy_weights
from rlplug_rollout_trtllm.engine_host import CLOSE_S, RESET, UNKNOWN_ARGUMENT, EngineHost
from rlplug_rollout_trtllm.environment import NEEDED, engine_environment
from rlplug_rollout_trtllm.options import TRTLLMOptions, check_text_only
from rlplug_rollout_trtllm.placement import NAMESPACE, Bundles, attach
from rlplug_rollout_trtllm.sampling import SAMPLING_EXTRA, TRTLLMRequests
from rlplug_rollout_trtllm.surface import argument_names

MAX_CALLS: Final = 100_000
"""Calls of one actor at a time: each request is one while it runs."""
NO_WEIGHTS: Final = base64.b64encode(pickle.dumps([])).decode("ascii")
"""A bucket of handles to nothing: it opens a sync, whose weights come through the group."""


class TRTLLMRayRollout(TrackedEngine):
    """Generates with TensorRT-LLM on GPUs that the trainer does not have, of the hosts of a Ray cluster.

    The trainer's first rank starts the engines and sends the weights, in one process group with all of their workers.
    Every rank asks the engines in turn.

    Args:
        num_engines: Copies of the model, of ``tensor_parallel_size`` GPUs each.
        ray_address: Address of the cluster; ``auto`` is the one of this host.
        spans_hosts: Let the workers of one engine be on several hosts, where one has too few GPUs.
        generate_deadline_s: A rollout that takes longer, or a request that was submitted, counts as a fault: all
            engines start anew.
        start_deadline_s: Longest time for a start, and for GPUs to be free, in seconds.
        sync_deadline_s: Longest time for each bucket of weights, in seconds.
        options: Those of :class:`rlplug_rollout_trtllm.options.TRTLLMOptions`.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=False, disaggregated=True, streaming=True, fp8_refit=True, multi_turn=True, tensor_parallel=True
    )
    sampling_extra = SAMPLING_EXTRA
    options: TRTLLMOptions
    requests: TRTLLMRequests

    def __init__(
        self,
        num_engines: int = 1,
        ray_address: str = "auto",
        spans_hosts: bool = False,
        generate_deadline_s: float = 1800.0,
        start_deadline_s: float = 1800.0,
        sync_deadline_s: float = 300.0,
        **options: Any,
    ) -> None:
        if num_engines < 1:
            raise ConfigError(f"rollout.num_engines is {num_engines}: give a positive number.")
        self.options = TRTLLMOptions(**options)
        super().__init__(self.options, self.options.enable_block_reuse, generate_deadline_s)
        self.num_engines = num_engines
        self.ray_address = ray_address
        self.spans_hosts = spans_hosts
        self.start_deadline_s = start_deadline_s
        self.sync_deadline_s = sync_deadline_s
        self._ranks: EngineRanks | None = None
        self._loop: EngineLoop | None = None
        self._sender: RayWeightSender | None = None
        self._own: list[tuple[Bundles, RayEngine]] = []
        self._ray: Any = None
        self._has_attached = False

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> None:
        """Return nothing: the GPUs of a Ray cluster are of a size that is not known before the run."""

    def check(self, policy: PolicySpec) -> None:
        check_text_only(policy)
        super().check(policy)

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        began = time.perf_counter()
        self._weights = policy_weights(policy)
        if self._ranks is None:  # once: a restart finds the same ranks
            waiting_s = max(self.generate_deadline_s, self.start_deadline_s * self.num_engines, self.sync_deadline_s)
            self._ranks = EngineRanks(placement, placement.world_size, waiting_s)
        with engine_environment(), preserved_rng():
            arguments = self.options.arguments(policy, argument_names())
            self._ray, self._has_attached = attach(self.ray_address)
        loop = self._loop = EngineLoop("TensorRT-LLM")
        try:
            with preserved_rng():
                hosts = self._ranks.from_first(lambda: self._make_engines(arguments, loop, placement.device))
        except BaseException:
            self.close()
            raise
        engines = [RayEngine(self._ray.get_actor(name, namespace=NAMESPACE)) for name in hosts]
        first = placement.rank % len(engines)
        turns: Any = [*engines[first:], *engines[:first]]
        self._stats, longest = self.options.stats(is_alone=False), self.options.longest(policy)
        self._requests = TRTLLMRequests(loop, turns, policy, longest, self._stats, self.generate_deadline_s)
        where, seconds = ", ".join(sorted(set(hosts.values()))), time.perf_counter() - began
        rank_zero_info(f"TensorRT-LLM: {len(engines)} engines on {where}; started in {seconds:.0f} s")

    def _make_engines(self, arguments: Mapping[str, Any], loop: EngineLoop, device: torch.device) -> dict[str, str]:
        """Start all engines, join a group with their workers, and return the address of each engine's host by name."""
        size, run = self.options.tensor_parallel_size, uuid.uuid4().hex[:8]
        names = [f"trtllm-{run}-{number}" for number in range(self.num_engines)]
        try:
            for name in names:
                bundles = Bundles.reserve(self._ray, size, self.spans_hosts, self.start_deadline_s)
                self._own.append((bundles, RayEngine.make(self._ray, name, bundles)))
            starts = [engine.start(arguments, bundles, False) for bundles, engine in self._own]
            loop.run_all(starts, "start", self.start_deadline_s)
            questions = [engine.address() for _, engine in self._own]
            hosts = dict(zip(names, loop.run_all(questions, "address", self.start_deadline_s), strict=True))
            urls = {f"ray://{hosts[name]}/{name}": engine for name, (_, engine) in zip(names, self._own, strict=True)}
            self._sender = RayWeightSender(loop, urls, size, device, self.sync_deadline_s)
            self._sender.connect()
        except EngineFault as problem:
            raise RunError(f"TensorRT-LLM did not start: {problem} {UNKNOWN_ARGUMENT}") from problem
        except RLPlugError:
            raise
        except Exception as problem:
            raise RunError(f"Ray failed to start engines: {type(problem).__name__}: {problem}") from problem
        return hosts

    def close(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(EngineFault):  # what is left then ends with its actor
                self._loop.run_all([engine.close() for _, engine in self._own], "shutdown", CLOSE_S)
        if self._sender is not None:
            self._sender.close()
        for bundles, engine in self._own:
            self._ray.kill(engine.actor)
            bundles.remove()
        if self._loop is not None:
            self._loop.close()
        if self._has_attached and self._ray.is_initialized():
            self._ray.shutdown()
        self._sender, self._loop, self._own, self._ray, self._has_attached = None, None, [], None, False

    # ---- weights --------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """Take every weight. A sync that is refused, or breaks off, stays open in the engines: the next one ends it."""
        assert self._ranks is not None, "start comes first"
        validator, reports = self.validator(), list[SyncReport]()

        def complete() -> Iterator[Bucket]:
            yield from validator.count(buckets)
            reports.append(validator.report(version))  # what is missing is refused before engines hear that all came

        counted = complete()
        fault: EngineFault | None = None
        parts: dict[str, float] = {}
        try:
            self.requests.wait_until_idle()
            if self._sender is not None:
                parts = self._sender.send(counted, version)
        except EngineFault as problem:
            fault = problem
        for _ in counted:  # the other ranks wait in those that are left
            pass
        # no rank may generate before all weights are there
        own = "" if fault is None else str(fault)
        if message := self._ranks.from_first(lambda: own) or own:
            raise EngineFault(message) from fault
        self.requests.version = version
        return replace(reports[0], parts=parts)


class RayEngine:
    """One engine, as a rank of the trainer sees it: the methods of its :class:`EngineHost`, which is an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*arguments: Any, **keywords: Any) -> Any:
            return await getattr(self.actor, method).remote(*arguments, **keywords)

        return call

    @classmethod
    def make(cls, ray: Any, name: str, bundles: Bundles) -> RayEngine:
        """Make the actor of an engine, which has not started yet, on the host of the engine's first worker."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        near = NodeAffinitySchedulingStrategy(bundles.first_node(), soft=False)
        taken = {"num_cpus": 0, "num_gpus": 0}  # its workers have them
        chosen = {"name": name, "namespace": NAMESPACE, "max_concurrency": MAX_CALLS, "scheduling_strategy": near}
        return cls(ray.remote(EngineHost).options(**chosen, **taken, runtime_env={"env_vars": dict(NEEDED)}).remote())


class RayWeightSender(WeightSender):
    """Sends weights from the trainer's rank 0 to the workers of all engines, which are given by a URL of their host."""

    engine = "TensorRT-LLM"

    def __init__(
        self, loop: EngineLoop, engines: Mapping[str, Any], workers: int, device: torch.device, deadline_s: float
    ) -> None:
        super().__init__(list(engines), device, deadline_s)
        self._loop = loop
        self._engines = engines
        self._workers = workers
        self._opening: dict[str, dict[str, str]] = {}

    # ---- joining --------------------------------------------------------------------------------------------------

    def num_workers(self, url: str) -> int:
        return self._workers

    def ask_to_join(self, url: str, rendezvous: Rendezvous) -> Future[Any]:
        return self._loop.spawn(self._join_workers(url, rendezvous))

    async def _join_workers(self, url: str, rendezvous: Rendezvous) -> None:
        on_gpu, call = self._device.type == "cuda", self._engines[url].call
        joins = []
        for worker in range(self._workers):
            meeting = replace(rendezvous, rank_offset=rendezvous.rank_offset + worker)
            arguments = (meeting, on_gpu, self._deadline_s)
            joins.append(call("collective_rpc", "rlplug_join", args=arguments, unique_reply_rank=worker))
        self._opening[url] = {uuid: NO_WEIGHTS for (uuid,) in await asyncio.gather(*joins)}

    def join(self, address: str, port: int, world_size: int) -> Group:
        return SendGroup.over_tcp(Rendezvous(address, port, 0, world_size), self._device, self._deadline_s)

    def remedy(self) -> str:
        return "Their hosts must reach the trainer's first, and each other, over TCP and NCCL (NCCL_SOCKET_IFNAME)."

    # ---- a sync ---------------------------------------------------------------------------------------------------

    def begin(self, url: str) -> None:
        engine = {url: self._engines[url]}
        self._call(engine, "pause_generation")
        self._call(engine, "update_weights", self._opening[url])

    def ask_to_receive(self, url: str, tensors: TensorList, version: int) -> Future[Any]:
        lists = (tensors.names, tensors.dtypes, tensors.shapes)
        return self._loop.spawn(self._engines[url].call("collective_rpc", "rlplug_receive", args=lists))

    def finish(self) -> None:
        self._call(self._engines, "update_weights", None)
        self._call(self._engines, *RESET)
        self._call(self._engines, "resume_generation")

    def abandon(self) -> None:
        """Leave the sync open in the engines: the next one ends it."""
        self._call(self._engines, "resume_generation")

    def _call(self, engines: Mapping[str, Any], method: str, *arguments: Any) -> None:
        self._loop.run_all([each.call(method, *arguments) for each in engines.values()], method, self._deadline_s)
