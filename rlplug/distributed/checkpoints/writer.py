"""Writer of checkpoints, with checksums."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlplug.distributed.checkpoints.files import CONFIG, CONFIG_KEY, MANIFEST, OTHERS, TENSORS, FileDigest, has_key
from rlplug.distributed.durable_files import replaced, write_file


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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with disk_errors():
            results = super().write_data(plan, planner).value()
        names = sorted({result.storage_data.relative_path for result in results})
        digests = [FileDigest.of(Path(self.path) / name) for name in names]
        # a digest travels to rank 0 as the result of a tensor that there is not
        results += [WriteResult(metadata.MetadataIndex(each.name), each.size, each) for each in digests]
        written: Future[list[WriteResult]] = Future()
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
        if has_key(config or ""):
            folder.chmod(0o700)  # hyperparameters are the configuration too
        with replaced(folder / OTHERS) as partial, disk_errors(), partial.open("wb") as file:
            torch.save(checkpoint, file)
        if config is not None:
            write_file(folder / CONFIG, config)
