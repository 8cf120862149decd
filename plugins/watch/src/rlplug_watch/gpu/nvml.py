"""Samples a GPU through NVML in a thread: how busy it is, the memory that all its processes take, and its power."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from rlplug.types import GIB

INTERVAL_S: Final = 0.25
"""Time between samples, in seconds. NVML's busy share is of a period of its own, 1/6 s to 1 s by the kind of GPU."""
MOST_FAILURES: Final = 20
"""Samples in a row that fail before a sampler ends: five seconds. A driver fails now and then, and recovers."""
JOIN_S: Final = 1.0
"""Longest time that the end of a sampler waits for its thread: a call about a lost GPU may not return."""

MEASURES: Final = ("busy_share", "memory_gib", "power_w")
Samples: TypeAlias = dict[str, list[float]]
"""Values of each of ``MEASURES``, as far as the GPU has them."""


class GPUSampler:
    """Samples one GPU until it is closed.

    Args:
        nvml: The module ``pynvml`` of ``nvidia-ml-py``.
        uuid: UUID of the GPU, such as ``GPU-3c6d...``.
        interval_s: Time between samples, in seconds.

    Raises:
        nvml.NVMLError: There is no driver, no such GPU, or it cannot be read.
    """

    def __init__(self, nvml: Any, uuid: str, interval_s: float = INTERVAL_S) -> None:
        self._nvml = nvml
        self.interval_s = interval_s
        self.problem = ""
        """Why it ended; empty while it samples."""
        self.unsupported: list[str] = []
        """Those of ``MEASURES`` that the GPU or its driver does not have."""
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._reads: dict[str, Callable[[], float]] = {
                "busy_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            }
            for name in MEASURES:
                self._try(name)
        except BaseException:
            nvml.nvmlShutdown()
            raise
        self._samples: Samples = {name: [] for name in self._reads}
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlplug-gpu-use", daemon=True)
        self._thread.start()

    def _try(self, name: str) -> None:
        """Read a measure once, and leave out what is not supported."""
        try:
            self._reads[name]()
        except self._nvml.NVMLError_NotSupported:
            del self._reads[name]
            self.unsupported.append(name)

    def _run(self) -> None:
        num_failures = 0
        while self._reads and not self._is_closed.wait(self.interval_s):
            try:
                values = {name: read() for name, read in self._reads.items()}
            except self._nvml.NVMLError as error:
                num_failures += 1
                if num_failures == MOST_FAILURES or isinstance(error, self._nvml.NVMLError_GpuIsLost):
                    self.problem = f"{error} ({type(error).__name__})"
                    return
                continue
            num_failures = 0
            with self._lock:
                for name, value in values.items():
                    self._samples[name].append(value)

    def drain(self) -> Samples:
        """Return the samples since the last call."""
        with self._lock:
            samples, self._samples = self._samples, {name: [] for name in self._reads}
        return samples

    def close(self) -> None:
        """End the thread; safe to call twice."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._nvml.nvmlShutdown()
