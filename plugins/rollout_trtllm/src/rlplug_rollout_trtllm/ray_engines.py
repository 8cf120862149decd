"""Engines as actors of a Ray cluster: how they are started, asked, and given weights."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

import torch

from rlplug.interfaces import Bucket, EngineFault
from rlplug.rollout.engines import EngineLoop
from rlplug.rollout.servers import TensorList, WeightSender
from rlplug.rollout.servers.process_group import Group, Rendezvous, SendGroup
from rlplug_rollout_trtllm.engine_host import RESET, EngineHost
from rlplug_rollout_trtllm.environment import NEEDED
from rlplug_rollout_trtllm.placement import Bundles

NAMESPACE: Final = "rlplug"
"""Of the actors' names in the cluster."""
MAX_CALLS: Final = 100_000
"""Calls of one actor at a time: each request is one while it runs."""
NO_WEIGHTS: Final = base64.b64encode(pickle.dumps([])).decode("ascii")
"""A bucket of handles to nothing: it opens a sync, whose weights come through the group."""


class RayEngine:
    """One engine, as a rank of the trainer sees it: the methods of its :class:`EngineHost`, which is an actor.

    Args:
        actor: Ray's handle.
    """

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

        remote = ray.remote(EngineHost)
        return cls(
            remote.options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                num_gpus=0,  # its workers have them
                max_concurrency=MAX_CALLS,
                runtime_env={"env_vars": dict(NEEDED)},
                scheduling_strategy=NodeAffinitySchedulingStrategy(bundles.first_node(), soft=False),
            ).remote()
        )


class RayWeightSender(WeightSender):
    """Sends weights from the trainer's rank 0 to the workers of all engines.

    Args:
        loop: Engines are called in it.
        engines: All of them, by a URL of their host.
        workers: Of each engine.
        device: Where the trainer's weights are.
        deadline_s: For joining, and for each bucket.
    """

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

    def send(self, buckets: Iterable[Bucket], version: int) -> None:
        """Send all weights. A sync that breaks off stays open in the engines: the next one ends it."""
        self._on_all("pause_generation")
        for url in self._urls:
            self.begin(url)
        try:
            for bucket in buckets:
                self._send_bucket(bucket, version)
        except EngineFault:
            raise
        except Exception:
            self._on_all("resume_generation")
            raise
        self.finish()

    def begin(self, url: str) -> None:
        work = self._engines[url].call("update_weights", self._opening[url])
        self._loop.run_all([work], "update_weights", self._deadline_s)

    def ask_to_receive(self, url: str, tensors: TensorList, version: int) -> Future[Any]:
        lists = (tensors.names, tensors.dtypes, tensors.shapes)
        return self._loop.spawn(self._engines[url].call("collective_rpc", "rlplug_receive", args=lists))

    def finish(self) -> None:
        self._on_all("update_weights", None)
        self._on_all(*RESET)
        self._on_all("resume_generation")

    def leave(self) -> None:
        self._on_all("collective_rpc", "rlplug_leave")

    def _on_all(self, method: str, *arguments: Any) -> None:
        work = [engine.call(method, *arguments) for engine in self._engines.values()]
        self._loop.run_all(work, method, self._deadline_s)
