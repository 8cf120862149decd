"""Writers of checkpoints, with checksums: one that training waits for, and one that goes on in the background."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from rlplug.distributed.checkpoint_files import CONFIG, MANIFEST, OTHERS, TENSORS, FileDigest
from rlplug.distributed.durable_files import replaced, write_file

CONFIG_KEY: Final = "rlplug_config"
"""Key of a checkpoint with the text of its file ``config.yaml``."""


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise what the disk said, such as that it is full, where torch hides it behind an error of its zip writer.

    That is one of ``unexpected pos``, raised while the file of a failed write is ended, in which it is the context.
    """
    handled = sys.exc_info()[1]  # a failed run saves too
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__
        while cause not in (None, handled) and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause in (None, handled):
            raise
        raise cause from None


class ChecksumWriter(FileSystemWriter):
    """DCP's writer to a folder, which also writes the manifest; each rank reads its own files for it."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        with disk_errors():
            results = super().write_data(plan, planner).value()
        names = sorted({result.storage_data.relative_path for result in results})
        digests = [FileDigest.of(Path(self.path) / name) for name in names]
        # a digest travels to rank 0 as the result of a tensor that there is not
        results += [WriteResult(metadata.MetadataIndex(each.name), each.size, each) for each in digests]
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        flat = [result for part in results for result in part]
        digests = [each.storage_data for each in flat if isinstance(each.storage_data, FileDigest)]
        super().finish(metadata, [[each for each in flat if not isinstance(each.storage_data, FileDigest)]])
        folder = Path(self.path)
        present = [folder / name for name in (TENSORS, OTHERS, CONFIG) if (folder / name).exists()]
        digests += [FileDigest.of(path) for path in present]
        files = {each.name: {"size": each.size, "xxh3": each.xxh3} for each in digests}
        write_file(folder / MANIFEST, json.dumps({"files": files}, indent=1))


def take_tensors(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Remove the tensors of model and optimizers from a checkpoint of Lightning, and return them for DCP."""
    tensors = {"state_dict": checkpoint.pop("state_dict")}
    states = checkpoint.pop("optimizer_states", [])
    return tensors | {f"optimizer_{index}": state for index, state in enumerate(states)}


def write_others(checkpoint: dict[str, Any], folder: Path) -> None:
    """Write what :func:`take_tensors` leaves, from rank 0; before DCP writes, which ends with the manifest."""
    config = checkpoint.pop(CONFIG_KEY, None)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / OTHERS) as partial, disk_errors(), partial.open("wb") as file:
            torch.save(checkpoint, file)
        if config is not None:
            write_file(folder / CONFIG, config)


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
