"""Engines as actors of a Ray cluster: how they are started, asked, and given weights."""

from __future__ import annotations

import asyncio
import base64
import pickle
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch

from rlplug.interfaces import Bucket, EngineFault
from rlplug.rollout.servers.process_group import Group, GroupBackend, Rendezvous
from rlplug.rollout.servers.weight_sender import TensorList, WeightSender
from rlplug_rollout_trtllm.engine_host import EngineHost
from rlplug_rollout_trtllm.engine_loop import EngineLoop
from rlplug_rollout_trtllm.environment import NEEDED
from rlplug_rollout_trtllm.placement import Bundles, first_node
from rlplug_rollout_trtllm.sampling import Output
from rlplug_rollout_trtllm.weight_group import make_group
from rlplug_rollout_trtllm.weights import flattened

NAMESPACE: Final = "rlplug"
"""Of the actors' names in the cluster."""
MAX_CALLS: Final = 100_000
"""Calls of one actor at a time: each request is one while it runs."""
NO_WEIGHTS: Final = base64.b64encode(pickle.dumps([])).decode("ascii")
"""A bucket of handles to nothing: it opens a sync, whose weights come through the group."""


@dataclass(frozen=True)
class EngineAddress:
    """An engine's name in the cluster, and the address of the host that it runs on."""

    name: str
    address: str


class RayEngine:
    """One engine, as a rank of the trainer sees it.

    Args:
        actor: Ray's handle of an :class:`EngineHost`.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def generate(self, name: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any]) -> Output:
        """Return what is generated for one request."""
        output: Output = await self.actor.generate.remote(name, tuple(prompt_ids), dict(sampling))
        return output

    async def abort(self, names: Sequence[str]) -> None:
        """Stop requests."""
        await self.actor.abort.remote(list(names))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call another method of the host."""
        return await getattr(self.actor, method).remote(*arguments)


def make_actor(ray: Any, name: str, bundles: Bundles) -> Any:
    """Make the actor of an engine, which has not started yet, on the host of the engine's first worker."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(EngineHost)
    return remote.options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=0,
        num_gpus=0,  # its workers have them
        max_concurrency=MAX_CALLS,
        runtime_env={"env_vars": dict(NEEDED)},
        scheduling_strategy=NodeAffinitySchedulingStrategy(first_node(bundles), soft=False),
    ).remote()


class RayWeightSender(WeightSender):
    """Sends weights from the trainer's rank 0 to the workers of all engines.

    Args:
        loop: In which engines are called.
        engines: All of them, and where they are.
        workers: Of each engine.
        device: Where the trainer's weights are.
        deadline_s: For joining, and for each bucket.
    """

    engine = "TensorRT-LLM"

    def __init__(
        self,
        loop: EngineLoop,
        engines: Sequence[tuple[EngineAddress, RayEngine]],
        workers: int,
        device: torch.device,
        deadline_s: float,
    ) -> None:
        self._engines = {f"ray://{place.address}/{place.name}": engine for place, engine in engines}
        super().__init__(list(self._engines), device, deadline_s)
        self._loop = loop
        self._workers = workers
        self._backend: GroupBackend = "nccl" if device.type == "cuda" else "gloo"
        self._opening: dict[str, dict[str, str]] = {}

    # ---- joining --------------------------------------------------------------------------------------------------

    def num_workers(self, url: str) -> int:
        return self._workers

    def ask_to_join(self, url: str, meeting: Rendezvous) -> Future[Any]:
        return self._loop.spawn(self._join_workers(url, meeting))

    async def _join_workers(self, url: str, meeting: Rendezvous) -> None:
        questions = [
            self._engines[url].call(
                "call_worker",
                worker,
                "rlplug_join",
                self._backend,
                meeting.address,
                meeting.port,
                meeting.rank_offset + worker,
                meeting.world_size,
                self._deadline_s,
            )
            for worker in range(self._workers)
        ]
        self._opening[url] = dict.fromkeys(await asyncio.gather(*questions), NO_WEIGHTS)

    def join(self, address: str, port: int, world_size: int) -> Group:
        return make_group(self._backend, address, port, 0, world_size, self._deadline_s)

    def remedy(self) -> str:
        return "Their hosts must reach the trainer's first, and each other, over TCP and NCCL (NCCL_SOCKET_IFNAME)."

    # ---- a sync ---------------------------------------------------------------------------------------------------

    def send(self, buckets: Iterable[Bucket], version: int) -> None:
        """Send all weights. A sync that breaks off stays open in the engines: the next one ends it."""
        self._on_all("pause")
        for url in self._urls:
            self.begin(url)
        try:
            for bucket in buckets:
                self._send_bucket(bucket, version)
        except EngineFault:
            raise
        except Exception:
            self._on_all("go_on")
            raise
        self.finish()

    def begin(self, url: str) -> None:
        self._on_one(url, "update_weights", self._opening[url])

    def _send_bucket(self, bucket: Bucket, version: int) -> None:
        flat, slots = flattened([(name, tensor.to(self._device)) for name, tensor in bucket])
        questions = [
            self._loop.spawn(engine.call("call_workers", "rlplug_receive", slots, len(flat)))
            for engine in self._engines.values()
        ]
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._together(questions, lambda: self._broadcast([flat], stream))

    def ask_to_receive(self, url: str, tensors: TensorList, version: int) -> Future[Any]:
        raise NotImplementedError("buckets are sent as one buffer each")

    def finish(self) -> None:
        self._on_all("finish_update")
        self._on_all("forget")
        self._on_all("go_on")

    def leave(self) -> None:
        self._on_all("call_workers", "rlplug_leave")

    def _on_one(self, url: str, method: str, *arguments: Any) -> None:
        self._loop.run(self._engines[url].call(method, *arguments), method, self._deadline_s)

    def _on_all(self, method: str, *arguments: Any) -> None:
        work = [engine.call(method, *arguments) for engine in self._engines.values()]
        self._loop.run(gathered(work), method, self._deadline_s)


async def gathered(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return what all return, when they run at once."""
    return list(await asyncio.gather(*work))
