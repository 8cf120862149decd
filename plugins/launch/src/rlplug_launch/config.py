"""Options of ``rlplug launch``: the section ``launch`` of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

from rlplug_launch.launcher import Launcher


@dataclass
class ServersConfig:
    """Engine servers that run beside the trainer.

    Args:
        command: Starts one server. ``{host}`` and ``{port}`` stand for the address to listen on. There is no shell. The
            key that the trainer will present is in the environment variable of ``model.rollout``'s ``api_key_env``.
        count: Number of servers.
        gpus: GPUs of each server, all on one node.
        health: Route that answers 200 when a server is ready.
        port: Port of the first server of a node, the next one has the next; 0 takes free ones.
        start_deadline_s: Time for a server to become healthy, in seconds; one that is silent for as long starts again.
    """

    command: str
    count: int = 1
    gpus: int = 1
    health: str = "/health"
    port: int = 0
    start_deadline_s: float = 900.0


@dataclass
class LaunchConfig:
    """What a run starts, where, and how often again.

    Args:
        launcher: Where processes are started: ``Local`` by default, ``Slurm``, or one of a plugin.
        servers: Engine servers; by default none, and the engine is the trainer's own.
        max_restarts: How often the run starts again from its newest whole checkpoint after a fault, and how often each
            server does.
        grace_s: Time for the trainer to save after SIGTERM, in seconds.
    """

    launcher: Launcher | None = None
    servers: ServersConfig | None = None
    max_restarts: int = 3
    grace_s: float = 120.0
