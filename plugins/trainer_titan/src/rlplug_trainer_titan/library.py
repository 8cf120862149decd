"""The installed TorchTitan: its version, and the import of its models."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

import torch.distributed.fsdp as torch_fsdp

from rlplug.errors import ConfigError

SERIES: Final = "0.3"
"""TorchTitan's versions that this plugin was written for, ``0.3.*``; others name and place their parts differently."""
INSTALL: Final = f"pip install --no-deps 'torchtitan=={SERIES}.*'"
KERNELS: Final = "torchtitan.distributed.minimal_async_ep.kernels"
"""Module of TorchTitan that imports triton when its models are imported: kernels of a token dispatcher for GPUs."""
MESH_DIMS: Final = "DataParallelMeshDims"
"""Class of ``torch.distributed.fsdp`` that TorchTitan imports for its other back ends; torch 2.11 lacks it."""


def check_version() -> None:
    """Refuse to start without a supported TorchTitan.

    Raises:
        ConfigError: TorchTitan is not installed, or in another version.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise ConfigError(
            f"model.trainer is TorchTitan, and torchtitan is not installed: {INSTALL}. --no-deps leaves out wandb, "
            "datasets and others that its models do not import."
        ) from None
    if not found.startswith(f"{SERIES}."):
        raise ConfigError(
            f"model.trainer is TorchTitan, and torchtitan {found} is installed: this plugin supports {SERIES}.* alone. "
            f"{INSTALL}"
        )


def titan(name: str) -> Any:
    """Import a module of TorchTitan, such as ``models.llama3``.

    Raises:
        ConfigError: It does not import, because a package is missing or too old.
    """
    _leave_out_kernels()
    try:
        with _mesh_dims():
            return importlib.import_module(f"torchtitan.{name}")
    except ImportError as error:
        torch_version = version("torch")
        raise ConfigError(
            f"model.trainer is TorchTitan, and torchtitan {version('torchtitan')} does not import with torch "
            f"{torch_version}: {error}. Install what is missing; torch 2.11 or newer will do."
        ) from error


def _leave_out_kernels() -> None:
    """Put an empty module in the place of ``KERNELS`` where triton is not installed, as with torch for CPUs."""
    if KERNELS not in sys.modules and importlib.util.find_spec("triton") is None:
        sys.modules[KERNELS] = _Unavailable(KERNELS)


@contextmanager
def _mesh_dims() -> Iterator[None]:
    """Let TorchTitan import ``MESH_DIMS`` from a torch without it; ``partial_dtensor`` never makes one."""
    if hasattr(torch_fsdp, MESH_DIMS):
        yield
        return
    setattr(torch_fsdp, MESH_DIMS, type(MESH_DIMS, (), {"__init__": _raise_unavailable}))
    try:
        yield
    finally:
        delattr(torch_fsdp, MESH_DIMS)


def _raise_unavailable(self: Any, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(f"torch {version('torch')} has no {MESH_DIMS}: only the back end partial_dtensor works with it")


class _Unavailable(ModuleType):
    """Module whose every name is ``None``; the token dispatcher that would call them is not used."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
