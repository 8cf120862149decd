"""vLLM's servers as processes of this host: started, watched, and ended with the trainer."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug_rollout_vllm import server_keeper
from rlplug_rollout_vllm.http_client import HTTPClient

HOST: Final = "127.0.0.1"
POLL_S: Final = 0.5
PROGRESS_S: Final = 15.0
TAIL_LINES: Final = 40

OF_THE_TRAINER: Final = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)
"""Environment variables that would make a server a part of the trainer's process group."""

NOISE: Final = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")
"""Beginnings of lines that vLLM's libraries write whenever it ends."""


@dataclass(frozen=True)
class ServerProcess:
    """One server and its log."""

    url: str
    log: Path
    keeper: subprocess.Popen[bytes]

    def tail(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not line.startswith(NOISE)][-TAIL_LINES:])


class ServerProcesses:
    """Servers that run until ``close``, and no longer than this process.

    Args:
        arguments: Of vLLM's ``EngineArgs``, by name.
        devices: What each server sees as ``CUDA_VISIBLE_DEVICES``; ``None`` for a server on the CPU.
    """

    def __init__(self, arguments: Mapping[str, Any], devices: Sequence[str | None]) -> None:
        self.key = secrets.token_hex(32)
        folder = Path(tempfile.mkdtemp(prefix="rlplug-vllm-"))
        self._servers: list[ServerProcess] = []
        for index, (port, seen) in enumerate(zip(free_ports(len(devices)), devices, strict=True)):
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *to_flags(arguments)]
            command += ["--host", HOST, "--port", str(port), *frontend_flags()]
            log = folder / f"server-{index}.log"
            with log.open("wb") as file:
                keeper = subprocess.Popen(
                    [sys.executable, server_keeper.__file__, str(os.getpid()), *command],
                    env=self._environment(seen),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # an interrupt is the trainer's, which ends its servers itself
                )
            self._servers.append(ServerProcess(f"http://{HOST}:{port}", log, keeper))

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def problem(self, wait_s: float = 0.0) -> str:
        """Return what is known of a server that ended, waiting a little for that; an empty string when all run."""
        deadline = time.monotonic() + wait_s
        while True:
            for server in self._servers:
                if server.keeper.poll() is not None:
                    return (
                        f"The server {server.url} ended with status {server.keeper.returncode}; the end of its log "
                        f"{server.log}:\n{server.tail()}"
                    )
            if time.monotonic() >= deadline:
                return ""
            time.sleep(0.1)

    def logs(self) -> str:
        """Return where the logs are."""
        return ", ".join(str(server.log) for server in self._servers)

    def close(self) -> None:
        """End all servers and wait until their processes are gone."""
        for server in self._servers:
            server.keeper.terminate()
        for server in self._servers:
            try:
                server.keeper.wait(2 * server_keeper.GRACE_S)
            except subprocess.TimeoutExpired:
                server.keeper.kill()
                server.keeper.wait()
        self._servers = []

    def _environment(self, devices: str | None) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name not in OF_THE_TRAINER}
        environment["VLLM_API_KEY"] = self.key
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # the routes that take weights
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the cores are the trainer's too
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment


def wait_until_healthy(
    client: HTTPClient, urls: Sequence[str], deadline_s: float, processes: ServerProcesses | None
) -> None:
    """Wait for servers that start.

    Args:
        processes: Those of them that this process started.

    Raises:
        RunError: One has ended, or is not healthy by the deadline.
    """
    began = time.monotonic()
    next_line = PROGRESS_S
    for url in urls:
        while not client.is_healthy(url):
            if processes is not None and (problem := processes.problem()):
                raise RunError(f"vLLM did not start. {problem}")
            seconds = time.monotonic() - began
            if seconds > deadline_s:
                hint = "Does it run, and is the address right?" if processes is None else f"Log: {processes.logs()}"
                raise RunError(f"vLLM on {url} was not healthy after rollout.start_deadline_s {deadline_s:g} s. {hint}")
            if seconds > next_line:
                tell(f"waiting for vLLM on {url.partition('//')[2]}, {seconds:.0f} s")
                next_line += PROGRESS_S
            time.sleep(POLL_S)


def tell(text: str) -> None:
    """Print a line on the trainer's first rank."""
    from lightning.pytorch.utilities import rank_zero_info  # vLLM's processes, which import this package, need it not

    rank_zero_info(text)


def free_ports(count: int) -> list[int]:
    """Return ports of this host that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]


def to_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line that gives vLLM these arguments; ``None`` leaves one to vLLM."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            flags.append(f"--{flag}={json.dumps(value)}")
        elif isinstance(value, list | tuple):
            flags += [f"--{flag}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags


def frontend_flags() -> list[str]:
    """Return the arguments of the API server, as far as the installed vLLM has them."""
    wanted = {
        "middleware": "rlplug_rollout_vllm.server_key.RequireKey",
        "enable_scale_out": True,  # /inference/v1/generate is behind it in vLLM 0.32, and always there in 0.26
        "disable_uvicorn_access_log": True,
    }
    for module in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        try:
            known = importlib.import_module(module).FrontendArgs.__dataclass_fields__
        except ModuleNotFoundError:
            continue
        return to_flags({name: value for name, value in wanted.items() if name in known})
    raise EngineFault("the installed vLLM has no arguments of an API server where its known versions have them.")
