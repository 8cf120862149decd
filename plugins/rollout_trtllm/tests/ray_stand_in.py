"""As much of Ray as the plugin uses, in one process: it keeps count of GPUs, and runs actors in an event loop.

Nothing is sent between processes; arguments and results are pickled, as Ray would. What Ray itself does with a call,
it cannot show.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Cluster:
    """A cluster, and what was asked of it."""

    def __init__(self, gpus: int, is_reachable: bool = True) -> None:
        self.gpus = gpus
        self.free = gpus
        self.is_reachable = is_reachable
        self.inits: list[dict[str, Any]] = []
        self.strategies: list[str] = []
        self.is_initialized = False
        self.actors: dict[str, Actor] = {}
        self.options: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what ``import ray`` finds."""
        ray: Any = ModuleType("ray")
        util: Any = ModuleType("ray.util")
        groups: Any = ModuleType("ray.util.placement_group")
        strategies: Any = ModuleType("ray.util.scheduling_strategies")
        ray.init, ray.shutdown = self._init, self._shutdown
        ray.is_initialized = lambda: self.is_initialized
        ray.cluster_resources = lambda: {"GPU": float(self.gpus)}
        ray.available_resources = lambda: {"GPU": float(self.free)}
        ray.remote, ray.kill, ray.util = self._remote, self._kill, util
        ray.get_actor = lambda name, namespace: self.actors[f"{namespace}/{name}"]
        util.get_node_ip_address = lambda: "127.0.0.1"
        util.placement_group_table = lambda group: {"bundles_to_node_id": {0: f"node-of-{group.number}"}}
        groups.placement_group, groups.remove_placement_group = self._reserve, lambda group: group.give_back()
        strategies.NodeAffinitySchedulingStrategy = lambda node, soft: SimpleNamespace(node=node, soft=soft)
        modules = (ray, util, groups, strategies)
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def _init(self, address: str, **arguments: Any) -> None:
        arguments["address"] = address
        if not self.is_reachable and arguments["address"] != "local":
            raise ConnectionError("Could not find any running Ray instance.")
        self.inits.append(arguments)
        self.is_initialized = True
        if "num_gpus" in arguments:
            self.gpus = self.free = arguments["num_gpus"]

    def _shutdown(self) -> None:
        self.is_initialized = False

    def _reserve(self, bundles: list[dict[str, int]], strategy: str) -> Group:
        self.strategies.append(strategy)
        return Group(self, len(self.strategies), sum(bundle["GPU"] for bundle in bundles))

    def _remote(self, kind: type) -> Any:
        def options(**chosen: Any) -> Any:
            def make() -> Actor:
                self.options.append(chosen)
                actor = self.actors[f"{chosen['namespace']}/{chosen['name']}"] = Actor(kind(), self._loop)
                return actor

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)

    def _kill(self, actor: Actor) -> None:
        self.actors = {name: other for name, other in self.actors.items() if other is not actor}


class Group:
    """A placement group: it takes its GPUs when it is waited for, and gives them back once."""

    def __init__(self, cluster: Cluster, number: int, gpus: int) -> None:
        self._cluster, self.number, self._gpus, self._held = cluster, number, gpus, 0

    def __reduce__(self) -> Any:
        return str, (f"group {self.number}",)

    def wait(self, timeout_seconds: float) -> bool:
        if self._gpus > self._cluster.free:
            return False
        self._held = self._gpus
        self._cluster.free -= self._held
        return True

    def give_back(self) -> None:
        self._cluster.free += self._held
        self._held = 0


class Actor:
    """A handle: ``actor.method.remote(...)`` is awaitable."""

    def __init__(self, host: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._host, self._loop = host, loop

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any, **keywords: Any) -> Any:
            sent = pickle.loads(pickle.dumps((arguments, keywords)))
            future = asyncio.run_coroutine_threadsafe(self._call(name, *sent), self._loop)
            return asyncio.wrap_future(future)

        return SimpleNamespace(remote=remote)

    async def _call(self, name: str, arguments: Any, keywords: Any) -> Any:
        return pickle.loads(pickle.dumps(await getattr(self._host, name)(*arguments, **keywords)))
