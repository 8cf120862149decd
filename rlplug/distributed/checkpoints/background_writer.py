"""Writer of checkpoints in the background, while training goes on."""

from __future__ import annotations

import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from rlplug.distributed.checkpoints.writer import ChecksumWriter, take_tensors, write_others


class _Stager(AsyncStager):
    """Copies to host memory, pinned for a GPU, and keeps that memory for the next save.

    torch 2.11's ``DefaultStager`` frees it, and pinning it again would take longer than the copy.
    """

    _synchronize_after_execute = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copier = StateDictStager(pin_memory=device.type == "cuda", share_memory=False)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        on_gpu = self._device.type == "cuda"
        copied: dict[str, Any] = self._copier.stage(state_dict, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.synchronize(self._device)
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing: :meth:`stage` has waited for its copies."""

    def close(self) -> None:
        self._copier.close()  # type: ignore[no-untyped-call]


class BackgroundWriter:
    """Writer of one checkpoint at a time, in the format that ``read_checkpoint`` reads.

    Every rank must make one, and begin the same checkpoints in the same order. The host memory of the copy is kept
    for the next checkpoint.

    Args:
        device: Device of the tensors.
        timeout: Timeout of the writers' own collectives.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        # collectives of a thread need a group of their own: in the loop's group their order would differ among ranks
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._stager = _Stager(device)
        self._written: Future[None] | None = None
        self._began = 0.0

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` would return at once; on rank 0 only after all ranks have written."""
        return self._written is not None and self._written.done()

    def begin(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """Copy ``checkpoint``, as Lightning dumps it, and start to write it to ``folder``."""
        assert self._written is None
        self._began = time.monotonic()
        tensors = take_tensors(checkpoint)
        write_others(checkpoint, folder)
        writer = ChecksumWriter(folder)
        written = async_save(tensors, storage_writer=writer, process_group=self._group, async_stager=self._stager)
        assert not isinstance(written, AsyncSaveResponse)  # which only asynchronous staging returns
        self._written = written

    def wait(self) -> float:
        """Wait for the end of the write, and return the seconds since :meth:`begin`.

        Raises:
            OSError | RuntimeError | CheckpointException: Writing failed, here or on another rank.
        """
        assert self._written is not None
        written, self._written = self._written, None
        written.result()
        return time.monotonic() - self._began

    def close(self) -> None:
        """Free the host memory of the copy."""
        assert self._written is None
        self._stager.close()
