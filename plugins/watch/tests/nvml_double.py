"""A double of ``pynvml``: its functions, its errors by number, and what drivers answer when something is wrong."""

# ruff: noqa: N802 - the names are pynvml's
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlplug.types import GIB

CODES = {
    "Uninitialized": 1,
    "NotSupported": 3,
    "NotFound": 6,
    "DriverNotLoaded": 9,
    "LibraryNotFound": 12,
    "GpuIsLost": 15,
    "LibRmVersionMismatch": 18,
    "Unknown": 999,
}
UUID = "GPU-3c6d1e9a-0000-1111-2222-333344445555"


class NVMLError(Exception):
    """As pynvml's: a class for each code, with the code as ``value``."""

    value = 0

    def __str__(self) -> str:
        return f"NVML Error with code {self.value}"


ERRORS = {name: type(f"NVMLError_{name}", (NVMLError,), {"value": code}) for name, code in CODES.items()}


class NVML:
    """One GPU. ``fails`` has the errors of functions: one for each call, or one for all."""

    NVMLError = NVMLError
    NVMLError_NotSupported = ERRORS["NotSupported"]
    NVMLError_GpuIsLost = ERRORS["GpuIsLost"]

    def __init__(self, **fails: str | list[str]) -> None:
        self.fails = fails
        self.open = 0
        """How often it was initialised and not shut down; NVML counts too."""
        self.busy = 80

    def _call(self, function: str) -> None:
        if function != "nvmlInit" and not self.open:
            raise ERRORS["Uninitialized"]
        error = self.fails.get(function, "")
        if isinstance(error, list):
            error = error.pop(0) if error else ""
        if error:
            raise ERRORS[error]

    def nvmlInit(self) -> None:
        self._call("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self._call("nvmlShutdown")
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("nvmlDeviceGetHandleByUUID")
        if uuid != UUID:
            raise ERRORS["NotFound"]
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._call("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=self.busy, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=80 * GIB, free=70 * GIB, used=10 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._call("nvmlDeviceGetPowerUsage")
        return 300_000
