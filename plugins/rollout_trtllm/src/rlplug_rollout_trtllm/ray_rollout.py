"""``TRTLLMRayRollout``: TensorRT-LLM on GPUs of their own, on one host or on many, found through a Ray cluster.

It was never run on TensorRT-LLM itself, nor on Ray: a strict double and a stand-in take their places in the tests.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning.pytorch.utilities import rank_zero_info

from rlplug.distributed.rng import preserved_rng
from rlplug.errors import ConfigError, RLPlugError, RunError
from rlplug.interfaces import (
    Bucket,
    EngineCapabilities,
    EngineFault,
    Placement,
    PolicySpec,
    RolloutEngine,
    SyncReport,
)
from rlplug.rollout.engines import EngineRanks
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.fp8_engine_checks import check_fp8_fits
from rlplug.weight_sync.manifest import policy_weights
from rlplug.weight_sync.receive_checks import WeightSyncValidator
from rlplug_rollout_trtllm.engine_loop import EngineLoop
from rlplug_rollout_trtllm.engine_requests import EngineRequests
from rlplug_rollout_trtllm.environment import engine_environment
from rlplug_rollout_trtllm.options import TRTLLMOptions, check_text_only
from rlplug_rollout_trtllm.placement import Bundles, Strategy, attach, make_bundles, remove_bundles
from rlplug_rollout_trtllm.ray_engines import NAMESPACE, EngineAddress, RayEngine, RayWeightSender, gathered, make_actor
from rlplug_rollout_trtllm.stats import made_stats, seen_metrics
from rlplug_rollout_trtllm.versions import argument_names

CLOSE_S: Final = 60.0


class TRTLLMRayRollout(RolloutEngine):
    """Generates with TensorRT-LLM on GPUs that the trainer does not have, of the hosts of a Ray cluster.

    The trainer's first rank starts the engines and sends the weights, in one process group with all of their workers.
    Every rank asks the engines in turn.

    Args:
        num_engines: Copies of the model, of ``tensor_parallel_size`` GPUs each.
        ray_address: Of the cluster; ``auto`` is the one of this host.
        spans_hosts: Let the workers of one engine be on several hosts, where one has too few GPUs.
        generate_deadline_s: A rollout that takes longer, or a request that was submitted, counts as a fault: all
            engines start anew.
        start_deadline_s: The same for a start, and for free GPUs.
        sync_deadline_s: For each bucket of weights.
        options: Those of :class:`rlplug_rollout_trtllm.options.TRTLLMOptions`.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=False, disaggregated=True, streaming=True, fp8_refit=True, multi_turn=True, tensor_parallel=True
    )

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
        self.num_engines = num_engines
        self.ray_address = ray_address
        self.spans_hosts = spans_hosts
        self.generate_deadline_s = generate_deadline_s
        self.start_deadline_s = start_deadline_s
        self.sync_deadline_s = sync_deadline_s
        self._seats: EngineRanks | None = None
        self._loop: EngineLoop | None = None
        self._sender: RayWeightSender | None = None
        self._own: list[tuple[Bundles, RayEngine]] = []
        self._ray: Any = None
        self._has_attached = False
        self.capabilities = replace(self.capabilities, multi_turn=self.options.enable_block_reuse)

    def check(self, policy: PolicySpec) -> None:
        check_text_only(policy)
        check_fp8_fits(type(self).__name__, policy, self.options.tensor_parallel_size)

    # ---- start and close ------------------------------------------------------------------------------------------

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        began = time.perf_counter()
        self._placement, self._weights = placement, policy_weights(policy)
        if self._seats is None:  # once: a restart finds the same ranks
            waiting_s = max(self.generate_deadline_s, self.start_deadline_s * self.num_engines, self.sync_deadline_s)
            self._seats = EngineRanks(placement, placement.world_size, waiting_s + 60)
        with engine_environment(), preserved_rng():
            arguments = self.options.arguments(policy, argument_names())
            self._ray, self._has_attached = attach(self.ray_address)
        loop = self._loop = EngineLoop()
        try:
            with preserved_rng():
                places = self._seats.from_first(lambda: self._make_engines(arguments, loop))
        except BaseException:
            self.close()
            raise
        engines = [RayEngine(self._ray.get_actor(place.name, namespace=NAMESPACE)) for place in places]
        first = placement.rank % len(engines)
        self._stats = made_stats(self.options)
        self._requests = EngineRequests(
            loop,
            [*engines[first:], *engines[:first]],
            policy,
            self.options.longest(policy),
            self._stats,
            self.generate_deadline_s,
        )
        hosts = ", ".join(sorted({place.address for place in places}))
        rank_zero_info(
            f"TensorRT-LLM: {len(places)} engines on {hosts}; started in {time.perf_counter() - began:.0f} s"
        )

    def _make_engines(self, arguments: Mapping[str, Any], loop: EngineLoop) -> list[EngineAddress]:
        """Start all engines, and join a group with their workers.

        Raises:
            RunError: There are too few GPUs, or an engine did not start.
        """
        size, run = self.options.tensor_parallel_size, uuid.uuid4().hex[:8]
        names = [f"trtllm-{run}-{number}" for number in range(self.num_engines)]
        try:
            for name in names:
                strategy: Strategy = "PACK" if self.spans_hosts else "STRICT_PACK"
                bundles = make_bundles(self._ray, size, strategy, self.start_deadline_s)
                self._own.append((bundles, RayEngine(make_actor(self._ray, name, bundles))))
            starts = [
                engine.call("start", arguments, [bundles.group], [bundles.indices], False)
                for bundles, engine in self._own
            ]
            loop.run(gathered(starts), "start", self.start_deadline_s)
            addresses = loop.run(
                gathered([engine.call("address") for _, engine in self._own]), "address", self.start_deadline_s
            )
            places = [EngineAddress(name, address) for name, address in zip(names, addresses, strict=True)]
            pairs = [(place, engine) for place, (_, engine) in zip(places, self._own, strict=True)]
            self._sender = RayWeightSender(loop, pairs, size, self._placement.device, self.sync_deadline_s)
            self._sender.connect()
        except EngineFault as problem:
            raise RunError(
                f"TensorRT-LLM did not start: {problem} If it does not know an argument: python -m "
                "rlplug_rollout_trtllm.smoke --surface-only says what differs."
            ) from problem
        except RLPlugError:
            raise
        except Exception as problem:
            raise RunError(f"Ray failed to start engines: {type(problem).__name__}: {problem}") from problem
        return places

    def close(self) -> None:
        sender, self._sender = self._sender, None
        loop, self._loop = self._loop, None
        own, self._own = self._own, []
        if loop is not None:
            with contextlib.suppress(EngineFault):  # what is left then ends with its actor
                loop.run(gathered([engine.call("close") for _, engine in own]), "shutdown", CLOSE_S)
        if sender is not None:
            sender.close()
        for bundles, engine in own:
            self._ray.kill(engine.actor)
            remove_bundles(bundles)
        if loop is not None:
            loop.close()
        if self._has_attached and self._ray.is_initialized():
            self._ray.shutdown()
        self._ray, self._has_attached = None, False

    # ---- generation -----------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        return self._requests.generate(requests, sampling)

    def submit(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._requests.submit(requests, sampling)

    def collect(self, timeout_s: float) -> list[Completion]:
        return self._requests.collect(timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._requests.abort(request_ids)

    def stats(self) -> dict[str, float]:
        return seen_metrics(self._stats)

    # ---- weights --------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        """Take every weight. A sync that is refused, or breaks off, stays open in the engines: the next one ends it."""
        assert self._seats is not None, "start comes first"
        receipt, reports = WeightSyncValidator(type(self).__name__, self._weights), list[SyncReport]()
        counted = self._complete(receipt, buckets, version, reports)
        fault: EngineFault | None = None
        try:
            self._requests.wait_until_idle()
            if self._sender is not None:
                self._sender.send(counted, version)
        except EngineFault as problem:
            fault = problem
        for _ in counted:  # the other ranks wait in those that are left
            pass
        # no rank may generate before all weights are there
        own = "" if fault is None else str(fault)
        if message := self._seats.from_first(lambda: own) or own:
            raise EngineFault(message) from fault
        self._requests.version = version
        return reports[0]

    def _complete(
        self, receipt: WeightSyncValidator, buckets: Iterable[Bucket], version: int, reports: list[SyncReport]
    ) -> Iterator[Bucket]:
        """Yield the buckets, and look for what is missing before engines are told that all came."""
        yield from receipt.count(buckets)
        reports.append(receipt.report(version))
