"""GPUs: the driver's answer (``nvidia-smi -q -x``), and torch's."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from rlplug_devkit.doctor.findings import Finding, Probe, ProbeError
from rlplug_devkit.doctor.host import GIB, gib

SMI_COMMAND: Final = ("nvidia-smi", "-q", "-x")
TORCH_COMMAND: Final = (sys.executable, str(Path(__file__).with_name("torch_probe.py")))
IDLE_BYTES: Final = 1 * GIB
"""A driver keeps some hundred MiB of a GPU that nobody uses."""
AREA: Final = "GPUs"


@dataclass(frozen=True)
class GPU:
    """A GPU as the driver describes it."""

    name: str
    total: int
    """Memory in bytes."""
    used: int
    compute_mode: str
    mig_mode: str
    num_processes: int


@dataclass(frozen=True)
class Driver:
    """What ``nvidia-smi`` says."""

    version: str
    cuda: str
    """Newest CUDA that the driver has, such as ``13.0``."""
    gpus: tuple[GPU, ...]


def read_smi(probe: Probe) -> Driver | None:
    """Return what ``nvidia-smi`` says; ``None`` where there is no such program.

    Raises:
        ProbeError: It failed, or wrote something else than it should.
    """
    if probe.is_missing:
        return None
    text = probe.output()
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ProbeError(f"wrote no XML ({error}): {text.strip()[:500]}") from None
    gpus = tuple(
        GPU(
            name=gpu.findtext("product_name", "unknown"),
            total=_mib(gpu.findtext("fb_memory_usage/total", "")),
            used=_mib(gpu.findtext("fb_memory_usage/used", "")),
            compute_mode=gpu.findtext("compute_mode", "Default"),
            mig_mode=gpu.findtext("mig_mode/current_mig", "N/A"),
            num_processes=len(gpu.findall("processes/process_info")),
        )
        for gpu in log.findall("gpu")
    )
    return Driver(log.findtext("driver_version", "unknown"), log.findtext("cuda_version", "unknown"), gpus)


def driver(probe: Probe) -> Iterator[Finding]:
    """Look at the driver and at each GPU's memory, modes and processes."""
    try:
        found = read_smi(probe)
    except ProbeError as problem:
        advice = "Correct the driver's installation; in a container, start it with the GPUs (docker run --gpus all)."
        yield Finding(AREA, "driver", f"nvidia-smi {problem}", "fails", advice)
        return
    if found is None:
        yield Finding(AREA, "driver", "no nvidia-smi: runs are on the CPU (trainer.accelerator: cpu)", "note")
        return
    yield Finding(AREA, "driver", f"{found.version}, for CUDA up to {found.cuda}")
    for index, gpu in enumerate(found.gpus):
        yield from _gpu(f"GPU {index}", gpu)


def _gpu(what: str, gpu: GPU) -> Iterator[Finding]:
    free = f"{gpu.name}, {gib(gpu.total - gpu.used)} of {gib(gpu.total)} free"
    if gpu.used > IDLE_BYTES:
        advice = "End what uses it (nvidia-smi lists processes), or choose others with CUDA_VISIBLE_DEVICES."
        yield Finding(AREA, what, f"{free}, {gpu.num_processes} processes", "warns", advice)
    else:
        yield Finding(AREA, what, free)
    if gpu.compute_mode != "Default":
        advice = "nvidia-smi -c DEFAULT: trainer, engine and servers may share a GPU."
        yield Finding(AREA, what, f"compute mode {gpu.compute_mode}", "warns", advice)
    if gpu.mig_mode == "Enabled":
        yield Finding(AREA, what, "divided by MIG", "note", "Each part counts as a GPU without peers: no NCCL between.")


def torch(probe: Probe | None, smi: Probe) -> Iterator[Finding]:
    """Look at what torch says of the GPUs.

    Args:
        probe: The process of ``torch_probe.py``; ``None`` to leave it out.
        smi: That of ``nvidia-smi``, whose answer says what torch should see.
    """
    if probe is None:
        return
    try:
        seen: Mapping[str, Any] = json.loads(probe.output())
    except (ProbeError, json.JSONDecodeError) as problem:
        advice = "Install torch anew; the last line names what it lacks."
        yield Finding(AREA, "torch", f"asking torch {problem}", "fails", advice)
        return
    build = f"built for CUDA {seen['cuda']}" if seen["cuda"] else "built for the CPU"
    there = _driver_or_none(smi)
    if not seen["available"]:
        has_gpus = there is not None and bool(there.gpus)
        yield Finding(
            AREA, "torch", f"{seen['version']}, {build}, sees no GPU", *_blind(seen, there if has_gpus else None)
        )
        return
    yield Finding(AREA, "torch", f"{seen['version']}, {build}, sees {len(seen['gpus'])} GPUs")
    yield Finding(AREA, "NCCL", seen["nccl"])
    yield from _architectures(seen)
    yield from _peers(seen["gpus"])


def _driver_or_none(smi: Probe) -> Driver | None:
    try:
        return read_smi(smi)
    except ProbeError:
        return None  # reported already


def _blind(seen: Mapping[str, Any], there: Driver | None) -> tuple[Any, ...]:
    """Return state and advice where torch sees no GPU."""
    if there is None:
        return ()
    if not seen["cuda"]:
        return "fails", f"Install a torch that is built for CUDA {there.cuda} or older."
    if _version(seen["cuda"]) > _version(there.cuda):
        return "fails", f"The driver has CUDA {there.cuda}: update it, or install a torch for that CUDA."
    return "fails", "Look at CUDA_VISIBLE_DEVICES, at the permissions of /dev/nvidia*, and at fabric manager's log."


def _architectures(seen: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn of a GPU for which torch has no kernels: neither of its generation, nor PTX of an older one."""
    named = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in seen["architectures"]]
    built = [(found[1], (int(found[2]), int(found[3]))) for found in named if found]
    for index, gpu in enumerate(seen["gpus"]):
        own = tuple(gpu["capability"])
        fits = any(version <= own and (kind == "compute" or version[0] == own[0]) for kind, version in built)
        if not fits:
            found = f"{gpu['name']}, sm_{own[0]}{own[1]}, and torch has kernels for {', '.join(seen['architectures'])}"
            yield Finding(AREA, f"GPU {index}", found, "fails", "Install a torch that is built for this GPU.")


def _peers(gpus: list[Mapping[str, Any]]) -> Iterator[Finding]:
    if len(gpus) < 2:
        return
    lacking = [
        f"{index} to {other}"
        for index, gpu in enumerate(gpus)
        for other in range(len(gpus))
        if other != index and other not in gpu["peers"]
    ]
    if not lacking:
        yield Finding(AREA, "peer access", "between all GPUs")
        return
    found = f"lacks {', '.join(lacking[:8])}{' and more' if len(lacking) > 8 else ''}"
    advice = "NCCL copies through the host there, which is slow; IOMMU (ACS) or a virtual machine may forbid it."
    yield Finding(AREA, "peer access", found, "warns", advice)


def _mib(text: str) -> int:
    number = text.split(" ")[0]
    return int(number) << 20 if number.isdigit() else 0


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
