"""What a run consists of: its tasks, and the command and environment of each."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rlplug_engines.servers.server_list import FILE_VARIABLE, ListedServer, key_of_server

from rlplug.errors import ConfigError
from rlplug.recording.run_folder import RUN_FOLDER_VARIABLE
from rlplug_launch.config import LaunchConfig, ServersConfig
from rlplug_launch.launcher import Place, TaskNeeds

CONTAINER: Final = re.compile(r"(?:^|[\s/'\"])(docker|podman|nerdctl)\s(?:.*\s)?(run|exec|start|compose)\s")


@dataclass(frozen=True)
class LaunchPlan:
    """The tasks of a run: the trainer's, one a node, and the engine servers.

    Args:
        config: The section ``launch``.
        num_nodes: Of the trainer: ``trainer.num_nodes``.
        num_ranks: On each of them: ``trainer.devices``.
        uses_gpus: Whether each rank takes a GPU.
        key_variable: Environment variable of a key, ``rollout.api_key_env``.
        paths: What each node must have.
    """

    config: LaunchConfig
    num_nodes: int
    num_ranks: int
    uses_gpus: bool
    key_variable: str
    paths: tuple[str, ...] = ()
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def with_new_key(self) -> LaunchPlan:
        """Return the plan of another attempt: who takes a port of the one before knows none of its keys."""
        return replace(self, key=secrets.token_hex(32))

    @property
    def num_servers(self) -> int:
        return 0 if self.config.servers is None else self.config.servers.count

    def tasks(self) -> list[TaskNeeds]:
        """Return all tasks, the trainer's first."""
        gpus = self.num_ranks if self.uses_gpus else 0
        trainers = [TaskNeeds(f"trainer {index}", gpus, own_node=True) for index in range(self.num_nodes)]
        gpus = 0 if self.config.servers is None else self.config.servers.gpus
        return trainers + [TaskNeeds(f"server {index}", gpus) for index in range(self.num_servers)]

    def wanted_ports(self, places: Sequence[Place]) -> list[int]:
        """Return the port that each task must have at its place; 0 for any."""
        ports = [0] * len(places)
        first = 0 if self.config.servers is None else self.config.servers.port
        for index in range(self.num_nodes, len(places) if first else 0):
            before = places[self.num_nodes : index]
            ports[index] = first + sum(place.address == places[index].address for place in before)
        return ports

    def server_command(self, place: Place, port: int) -> list[str]:
        """Return the command of a server."""
        return [_filled(word, place.address, port) for word in _words(self._servers.command)]

    def server_url(self, place: Place, port: int) -> str:
        return f"http://{place.address}:{port}"

    def server_environment(self, server: ListedServer) -> dict[str, str]:
        """Return a server's key: the trainer, which has the run's, finds that of each server by it."""
        return {self.key_variable: key_of_server(self.key, server)}

    def trainer_command(self, start: Sequence[str], urls: Sequence[str]) -> list[str]:
        """Return the command of the trainer on one node, which starts its other ranks there.

        Args:
            start: How it begins: with the configuration, or with ``--resume``.
            urls: Of the servers.
        """
        command = [sys.executable, "-m", "rlplug", "fit", *start]
        command += ["--trainer.num_nodes", str(self.num_nodes), "--trainer.devices", str(self.num_ranks)]
        return command + (["--model.rollout.init_args.urls", json.dumps(list(urls))] if urls else [])

    def trainer_environment(
        self, index: int, address: str, port: int, run_folder: Path, list_file: Path
    ) -> dict[str, str]:
        """Return what the trainer of a node finds the others by, in torchrun's and Lightning's variables.

        Args:
            list_file: List of the servers that are ready.
        """
        return {
            "NODE_RANK": str(index),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            RUN_FOLDER_VARIABLE: str(run_folder),
            **({self.key_variable: self.key, FILE_VARIABLE: str(list_file)} if self.num_servers else {}),
        }

    @property
    def _servers(self) -> ServersConfig:
        assert self.config.servers is not None
        return self.config.servers


def make_plan(config: Mapping[str, Any], launch: LaunchConfig, has_gpus: bool) -> LaunchPlan:
    """Return the plan of a resolved configuration.

    Args:
        config: That of ``rlplug fit``, as plain data.
        launch: Its section ``launch``.
        has_gpus: Whether ``trainer.accelerator: auto`` stands for GPUs.

    Raises:
        ConfigError: The number of ranks is not said, or the engine takes no URLs of servers.
    """
    trainer, policy = config["trainer"], config["model"]["policy"]["path"]
    devices = trainer["devices"]
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigError(
            f"trainer.devices is {devices!r}, and a launcher reserves before it sees a GPU: give the number per node."
        )
    rollout = (config["model"]["rollout"] or {}).get("init_args") or {}
    if launch.servers is not None:
        _check_servers(launch.servers, config["model"]["rollout"])
    return LaunchPlan(
        launch,
        int(trainer["num_nodes"]),
        int(devices),
        trainer["accelerator"] in ("gpu", "cuda") or (trainer["accelerator"] == "auto" and has_gpus),
        rollout.get("api_key_env", ""),
        (policy,) if Path(policy).is_dir() else (),
    )


def _check_servers(servers: ServersConfig, rollout: Any) -> None:
    options = (rollout or {}).get("init_args") or {}
    name = (rollout or {}).get("class_path", "HFRollout").rpartition(".")[2]
    if "urls" not in options or "api_key_env" not in options:
        raise ConfigError(
            f"launch.servers is set, and model.rollout is {name}, which takes no servers: take an engine with "
            "rollout.urls, such as VLLMServerRollout, or remove launch.servers."
        )
    if options["urls"] is not None:
        raise ConfigError("rollout.urls and launch.servers are both set: remove one; a launcher fills in the URLs.")
    for name, least in (("count", 1), ("gpus", 0), ("port", 0)):
        if getattr(servers, name) < least:
            raise ConfigError(f"launch.servers.{name} is {getattr(servers, name)}: give a number from {least}.")
    if not servers.health.startswith("/"):
        raise ConfigError(f"launch.servers.health is {servers.health!r}: give a route, such as /health.")
    _words(servers.command)
    if found := CONTAINER.search(servers.command):
        raise ConfigError(
            f"launch.servers.command has {found[1]} {found[2]}, whose server is no process of the command, so that the "
            "launcher neither knows it from a stranger's nor ends it: run rlplug launch in the container, or start the "
            "servers yourself and name them in rollout.urls."
        )
    if "{port}" not in servers.command:
        raise ConfigError(
            "launch.servers.command lacks {port}: write where the server takes its port, as --port {port}."
        )


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"launch.servers.command cannot be read: {error}.") from error
    if not words:
        raise ConfigError("launch.servers.command is empty: write the command that starts a server.")
    return words


def _filled(word: str, host: str, port: int) -> str:
    """Return a word of a command with its placeholders filled in; other braces stay, as JSON needs them."""
    return word.replace("{host}", host).replace("{port}", str(port))
