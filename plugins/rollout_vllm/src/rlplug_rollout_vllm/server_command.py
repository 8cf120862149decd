"""The command that starts one of vLLM's servers."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from rlplug.interfaces import EngineFault
from rlplug.rollout.servers.addresses import LOOPBACK
from rlplug.rollout.servers.processes import Launch, ServerSlot

NOISE: Final = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")
"""Beginnings of lines that vLLM's libraries write whenever it ends."""

KEY: Final = "VLLM_API_KEY"


def launch(arguments: Mapping[str, Any], place: ServerSlot) -> Launch:
    """Return how a server is started.

    Args:
        arguments: Of vLLM's ``EngineArgs``, by name.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *to_flags(arguments)]
    command += ["--host", LOOPBACK, "--port", str(place.port), *frontend_flags()]
    environment = {
        KEY: place.key,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that take weights
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),  # the trainer's cores too
        "VLLM_ENABLE_V1_MULTIPROCESSING": None,  # of an engine in the trainer's process
    }
    return Launch(command, environment)


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
