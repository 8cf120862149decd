"""Memory, disks, limits and ports of this host, and the variables that change how libraries behave."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from rlplug_devkit.doctor.findings import Finding

GIB: Final = 1 << 30
LEAST_SHARED_MEMORY: Final = 1 * GIB
"""NCCL and data loaders of one GPU take some hundred MiB; Docker's default is 64 MiB."""
LEAST_FREE_DISK: Final = 20 * GIB
"""A checkpoint of a 1B policy with Adam takes 16 GB."""
LEAST_OPEN_FILES: Final = 4096
"""Servers and process groups of a host of 8 GPUs open some thousand sockets and files."""
TORCHRUN_PORT: Final = 29500
VARIABLES: Final = re.compile(
    r"(CUDA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|HF|TRANSFORMERS|VLLM|SGLANG|TLLM|TRTLLM|RAY|RLPLUG|FLASHINFER|SLURM)_|"
    r"(MASTER_(ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_RANK|VIRTUAL_ENV|CONDA_PREFIX|PYTHONDONTWRITEBYTECODE)$"
)
SECRET: Final = re.compile("TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL")


def memory() -> Iterator[Finding]:
    """Look at the host's memory and cores, and at shared memory."""
    sizes = _meminfo()
    found = f"{gib(sizes['MemAvailable'])} of {gib(sizes['MemTotal'])} available, {os.cpu_count()} cores"
    yield Finding("host", "memory", found)
    if (limit := _cgroup_limit()) is not None and limit < sizes["MemTotal"]:
        yield Finding("host", "container's memory", gib(limit), "note", "Processes are killed above this limit.")
    size = shutil.disk_usage("/dev/shm").total
    if size < LEAST_SHARED_MEMORY:
        advice = "Give the container more, such as docker run --shm-size=16g: NCCL and data loaders fail without it."
        yield Finding("host", "shared memory", gib(size), "warns", advice)
    else:
        yield Finding("host", "shared memory", gib(size))


def available_memory() -> int:
    """Return the bytes that a process can still take before the host or its container ends it."""
    available, limit = _meminfo()["MemAvailable"], _cgroup_limit()
    return available if limit is None else min(available, limit)


def _meminfo() -> dict[str, int]:
    """Return the sizes of ``/proc/meminfo``, in bytes."""
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines}


def _cgroup_limit() -> int | None:
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            return int(text)
    return None


def disks() -> Iterator[Finding]:
    """Look at where runs, models and temporary files go."""
    cache = os.environ.get("HF_HOME") or str(Path.home() / ".cache/huggingface")
    folders = {
        "this folder": Path.cwd(),
        "models (HF_HOME)": Path(cache),
        "temporary files": Path(tempfile.gettempdir()),
    }
    for what, folder in folders.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        found = f"{gib(free)} free, {folder}"
        if not os.access(there, os.W_OK):
            yield Finding("host", what, f"{found}, which cannot be written", "warns", "Change its owner or its mode.")
        elif free < LEAST_FREE_DISK and what != "temporary files":
            yield Finding("host", what, found, "warns", "Free some: checkpoints take 16 bytes a parameter with Adam.")
        else:
            yield Finding("host", what, found)


def limits() -> Iterator[Finding]:
    """Look at this process's limits (``ulimit -a``)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, at most {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        raised = LEAST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
        yield Finding("host", "open files", found, "warns", f"ulimit -n {raised}")
    else:
        yield Finding("host", "open files", found)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and Path("/dev/infiniband").exists():
        advice = "ulimit -l unlimited (docker run --ulimit memlock=-1): InfiniBand needs locked memory."
        yield Finding("host", "locked memory", f"{_limit(soft)} bytes", "warns", advice)
    else:
        yield Finding("host", "locked memory", f"{_limit(soft)}{'' if soft == resource.RLIM_INFINITY else ' bytes'}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    yield Finding("host", "processes", _limit(soft))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        advice = "ulimit -v unlimited: CUDA reserves more addresses than the GPU has memory."
        yield Finding("host", "address space", f"{_limit(soft)} bytes", "warns", advice)


def ports() -> Iterator[Finding]:
    """Look at whether processes of this host can find and reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            yield Finding("host", "loopback", "a server can listen on 127.0.0.1")
    except OSError as error:
        advice = "Bring up the interface lo: ranks and engines' servers listen there."
        yield Finding("host", "loopback", f"no server can listen on 127.0.0.1: {error}", "fails", advice)
    try:
        with socket.create_server(("127.0.0.1", TORCHRUN_PORT)):
            pass
    except OSError:
        advice = "Nothing on one host, where a free port is taken; with torchrun, give --master-port."
        yield Finding("host", "port 29500", "taken by another process", "note", advice)
    name = socket.gethostname()
    try:
        yield Finding("host", "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        advice = f"Add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME: gloo looks the name up."
        yield Finding("host", "host name", f"{name} has no address: {error}", "warns", advice)


def variables(environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Look at variables of libraries; values of secrets are left out."""
    given = os.environ if environ is None else environ
    for name in sorted(filter(VARIABLES.match, given)):
        value = "set" if SECRET.search(name) else given[name]
        if name == "CUDA_LAUNCH_BLOCKING" and value not in ("", "0"):
            yield Finding("variables", name, value, "warns", "Unset it: every kernel is waited for.")
        elif name == "PYTHONDONTWRITEBYTECODE" and value:
            advice = "Unset it: each process of a run and of its engines compiles the Python of all libraries anew."
            yield Finding("variables", name, value, "note", advice)
        else:
            yield Finding("variables", name, value)


def gib(num_bytes: float) -> str:
    """Return a size in words."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):,.0f} MiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
