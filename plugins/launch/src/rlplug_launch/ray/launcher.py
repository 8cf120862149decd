"""``Ray``: the launcher for a Ray cluster that exists, or for one on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rlplug_engines.servers import LOOPBACK

from rlplug.errors import ConfigError, RunError
from rlplug_launch.launcher import LOST, Launcher, Place, RunningTask, TaskNeeds
from rlplug_launch.processes import node_command
from rlplug_launch.ray.agent import Agent

REPLY_S: Final = 60.0
CONCURRENCY: Final = 2
"""Calls that an actor runs at once: its wait for the end of the task, and one other."""


class RayTask(RunningTask):
    """A task that an actor has started."""

    def __init__(self, actor: Any) -> None:
        import ray

        self._ray = ray
        self._actor = actor
        self._ended = actor.wait.remote()

    def poll(self) -> int | None:
        if not self._ray.wait([self._ended], timeout=0)[0]:
            return None
        try:
            return int(self._ray.get(self._ended))
        except self._ray.exceptions.RayError:  # the actor has gone, and Ray ends its processes
            return LOST

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def kill(self) -> None:
        self._actor.kill.remote()


class Ray(Launcher):
    """Starts each task through an actor, in a place that a placement group has reserved.

    The trainer's nodes are Ray nodes of their own (``STRICT_SPREAD``), servers are packed. Each task has the GPUs that
    Ray gives its actor.

    Args:
        address: Address of a cluster, as ``ray.init`` takes it. By default that of ``RAY_ADDRESS``, else of a cluster
            that runs on this host, else a new one on this machine alone.
        cpus_per_task: CPUs to reserve for each task.
        wait_s: Time for the cluster to have room, in seconds: an autoscaler may have to start nodes.
    """

    def __init__(self, address: str | None = None, cpus_per_task: float = 1.0, wait_s: float = 600.0) -> None:
        self.address = address
        self.cpus_per_task = cpus_per_task
        self.wait_s = wait_s
        self._groups: list[Any] = []
        self._bundles: list[tuple[Any, int, TaskNeeds]] = []
        """Group, index in it, and task of each agent."""
        self._agents: list[Any] = []
        self._places: list[Place] = []
        self._entering: dict[int, tuple[Any, Any]] = {}
        """New agents of lost tasks, by the task's index, with what says that they have started."""

    def place(self, tasks: Sequence[TaskNeeds]) -> list[Place]:
        ray = self._connected()
        self._release()
        trainers = [task for task in tasks if task.own_node]
        others = [task for task in tasks if not task.own_node]
        for group, strategy in ((trainers, "STRICT_SPREAD"), (others, "PACK")):
            if group:
                self._reserve(group, strategy)
        try:
            hosts = ray.get([agent.enter.remote() for agent in self._agents], timeout=self.wait_s)
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"a Ray node cannot start a task: {_first_line(error)}. "
                f"Each node needs rlplug, rlplug-launch and the folder {os.getcwd()}."
            ) from error
        found = [ray.get(agent.__ray_call__.remote(_where), timeout=REPLY_S) for agent in self._agents]
        is_one_node = len({node for node, _ in found}) == 1
        self._places = [
            Place(f"{host}/{node[:6]}", LOOPBACK if is_one_node else address)
            for host, (node, address) in zip(hosts, found, strict=True)
        ]
        return self._places

    def _reserve(self, tasks: Sequence[TaskNeeds], strategy: str) -> None:
        import ray
        from ray.util.placement_group import placement_group

        bundles = [{"CPU": self.cpus_per_task} | ({"GPU": task.gpus} if task.gpus else {}) for task in tasks]
        group = placement_group(bundles, strategy=strategy)
        self._groups.append(group)
        if not group.wait(self.wait_s):
            raise ConfigError(
                f"Ray has no room for {', '.join(task.name for task in tasks)} ({strategy}: {bundles}) after "
                f"launch.launcher.wait_s {self.wait_s:g} s. Its nodes have {_nodes(ray)}."
            )
        for index, task in enumerate(tasks):
            self._bundles.append((group, index, task))
            self._agents.append(self._new_agent(len(self._agents)))

    def _new_agent(self, index: int) -> Any:
        """Have an actor started in the bundle of a task."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, bundle, task = self._bundles[index]
        options = {
            "num_cpus": self.cpus_per_task,
            "num_gpus": task.gpus,
            "max_concurrency": CONCURRENCY,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
        }
        return ray.remote(Agent).options(**options).remote(os.getcwd(), os.environ.get("OMP_NUM_THREADS"))

    def replace(self, index: int) -> Place | None:
        """Return another place, once Ray has moved the bundle of a lost node to one that has room."""
        import ray

        if index not in self._entering:
            agent = self._new_agent(index)
            self._entering[index] = agent, agent.enter.remote()
        agent, entered = self._entering[index]
        if not ray.wait([entered], timeout=0)[0]:
            return None
        del self._entering[index]
        try:
            host = ray.get(entered)
            node, address = ray.get(agent.__ray_call__.remote(_where), timeout=REPLY_S)
        except ray.exceptions.RayError as error:
            ray.kill(agent)
            if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed:
                return None  # it was sent to the lost node, of whose end Ray did not know yet
            raise RunError(f"Ray cannot start it: {_first_line(error)}") from error
        self._agents[index] = agent
        self._places[index] = Place(f"{host}/{node[:6]}", address)
        return self._places[index]

    def call(self, index: int, command: Sequence[str], timeout_s: float) -> str:
        import ray

        try:
            return str(ray.get(self._agents[index].call.remote(list(command), timeout_s), timeout=timeout_s + REPLY_S))
        except ray.exceptions.RayError as error:
            raise RunError(_first_line(error)) from error

    def start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: Path, grace_s: float
    ) -> RunningTask:
        import ray

        agent, wrapped = self._agents[index], node_command(command, self._places[index], grace_s)
        try:
            ray.get(agent.start.remote(wrapped, dict(environment), str(log)), timeout=REPLY_S)
        except ray.exceptions.RayError as error:
            raise RunError(f"{self._places[index].node}: {_first_line(error)}") from error
        return RayTask(agent)

    def close(self) -> None:
        self._release()

    def _release(self) -> None:
        if not self._groups:
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        agents = [*self._agents, *(agent for agent, _ in self._entering.values())]
        self._agents, self._bundles, self._entering = [], [], {}
        for agent in agents:
            ray.kill(agent)
        groups, self._groups = self._groups, []
        for group in groups:
            remove_placement_group(group)

    def _connected(self) -> Any:
        try:
            import ray
        except ModuleNotFoundError:
            raise ConfigError("the launcher Ray needs Ray: pip install 'rlplug-launch[ray]'.") from None
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, ValueError) as error:
                raise ConfigError(f"launch.launcher.address {self.address!r}: {error}") from error
        return ray


def _where(_: Any) -> tuple[str, str]:
    """Return id and address of an actor's node."""
    import ray

    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()  # type: ignore[no-untyped-call, unused-ignore]


def _nodes(ray: Any) -> str:
    """Return the resources of the cluster's nodes, for messages."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    kinds = ("CPU", "GPU")
    return "; ".join(" ".join(f"{node['Resources'].get(kind, 0):g} {kind}" for kind in kinds) for node in nodes)


def _first_line(error: BaseException) -> str:
    """Return what an error of Ray says last: above it is the traceback of another process."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
