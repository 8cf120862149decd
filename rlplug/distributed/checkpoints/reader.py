"""Readers of checkpoints: they verify the files by checksums, and run no code that a file may hold."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from rlplug.distributed.checkpoints.files import (
    CONFIG,
    MANIFEST,
    OTHERS,
    TENSORS,
    TRAINED,
    FileDigest,
    list_checkpoints,
    run_dir_of,
)
from rlplug.distributed.durable_files import own_bytes, reason
from rlplug.errors import ConfigError, RLPlugError, RunError

NEWEST_WHOLE: Final = "newest-whole"
"""Value of ``--ckpt_path`` that stands for what :func:`newest_whole` returns."""
READ_ERRORS: Final = (
    *(OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, EOFError),
    *(pickle.UnpicklingError, CheckpointException),
)
_OPTION: Final = re.compile(r"optimizer_\d+\.param_groups\.\d+\.")


# ---- choosing and verifying ---------------------------------------------------------------------------------------


def newest_checkpoint(run_dir: Path) -> Path:
    """Return the newest complete checkpoint of a run.

    Raises:
        ConfigError: The folder is not a run, or the run ended before its first checkpoint.
    """
    if found := list_checkpoints(run_dir):
        return found[-1]
    if not (run_dir / CONFIG).exists():
        raise ConfigError(f"--resume {run_dir}: this is not the folder of a run (it has no {CONFIG}).")
    link = "its checkpoints/ is a link, as no file of a run is. Put the folder that it leads to in its place."
    none = "the run has no checkpoint yet. Start a new run with a lower checkpoint.every_n_steps."
    raise ConfigError(f"--resume {run_dir}: {link if (run_dir / 'checkpoints').is_symlink() else none}")


def newest_whole(run_dir: Path) -> Path | None:
    """Return the newest checkpoint of a run whose files are as they were written; all of them are read for that."""
    return next((path for path in reversed(list_checkpoints(run_dir)) if find_damage(path) is None), None)


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Return the digests of a checkpoint's files by name.

    Raises:
        ValueError | OSError: There is no manifest, or it is damaged.
    """
    try:
        files = json.loads(own_bytes(folder / MANIFEST))["files"]
        digests = {name: FileDigest(name, each["size"], each["xxh3"]) for name, each in files.items()}
    except FileNotFoundError:
        raise ValueError(f"there is no {MANIFEST}, so rlplug has not written it, or not to the end") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is damaged") from error
    if not {TENSORS, OTHERS} <= digests.keys() or any("/" in name for name in digests):
        raise ValueError(f"{MANIFEST} is damaged")
    return digests


def find_damage(folder: Path, part: int = 0, num_parts: int = 1) -> str | None:
    """Compare the files of a checkpoint with its manifest; return what is wrong first, or ``None``.

    Args:
        folder: The checkpoint.
        part: Which of the files to read, of ``num_parts`` equal parts.
        num_parts: Number of processes that share the work.
    """
    try:
        digests = read_manifest(folder)
    except (ValueError, OSError) as error:
        return str(error) if isinstance(error, ValueError) else f"{MANIFEST} cannot be read: {reason(error)}"
    for name in sorted(digests)[part::num_parts]:
        try:
            found = FileDigest.of(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {reason(error)}"
        if found != digests[name]:
            if found.size != digests[name].size:
                return f"{name} has {found.size} bytes, and {digests[name].size} were written"
            return f"{name} has other bytes than were written"
    return None


def require_whole(folder: Path, problems: Sequence[str | None]) -> None:
    """Refuse a checkpoint that :func:`find_damage` has ``problems`` with, and name the newest one that is whole.

    Raises:
        RunError: There are problems.
    """
    found = [problem for problem in problems if problem is not None]
    if not found:
        return
    run_dir = run_dir_of(folder)
    whole = None if run_dir is None else newest_whole(run_dir)
    advice = "There is no other checkpoint of this run that is whole."
    if whole is not None:
        advice = f"{whole.name} is whole: go on from it with rlplug fit --resume {run_dir} --ckpt_path {NEWEST_WHOLE}"
    raise RunError(f"checkpoint {folder} is damaged: {found[0]}. {advice}")


# ---- reading ------------------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of DCP's ``.metadata`` that knows the classes of such a file and no others."""

    _classes: Final[Mapping[str, Any]] = {
        each.__name__: each
        for each in (
            *(Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.TensorProperties),
            *(metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta),
            *(metadata._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size, PosixPath, torch.serialization._get_layout),
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        found = self._classes.get(name)
        if found is not None and (module == found.__module__ or module.startswith("pathlib")):
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{TENSORS} names {module}.{name}, which no checkpoint of rlplug does")


class _PlainReader(FileSystemReader):
    """DCP's reader of a folder, which reads the pickle ``.metadata`` with :class:`_PlainUnpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / TENSORS).open("rb") as file:
            found = _PlainUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"{TENSORS} holds a {type(found).__name__}")
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        for item in plan.items:
            if os.sep in self.storage_data[item.storage_index].relative_path:
                raise pickle.UnpicklingError(f"{TENSORS} names a file outside of the checkpoint")
        return plan


class _PlainPlanner(DefaultLoadPlanner):
    """DCP's planner, which reads pickled values as tensors and plain data; upstream's runs any pickle.

    Options of an optimizer that the checkpoint does not have, such as those of a new schedule, stay as they are.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        saved = metadata.state_dict_metadata
        self.state_dict = {
            name: value for name, value in self.state_dict.items() if name in saved or not _OPTION.match(name)
        }

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # which refuses what is not plain
        value.seek(0)
        super().load_bytes(read_item, value)


def read_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    accept: Callable[[Path, Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Load the tensors of a checkpoint into ``model`` and ``optimizers`` and return all else. Collective.

    Args:
        folder: The checkpoint.
        model: Model whose tensors are overwritten.
        optimizers: Optimizers whose state is overwritten.
        accept: Called with the folder and all but the tensors, before one is overwritten; raises to refuse them.

    Raises:
        RunError: The checkpoint does not fit them, or cannot be read.
        RLPlugError: What ``accept`` raises.
    """
    try:
        others: dict[str, Any] = torch.load(folder / OTHERS, weights_only=True)
        if not isinstance(others, dict) or not isinstance(others.get("rlplug"), dict):
            raise ValueError(f"{OTHERS} is not of a run of rlplug")
        if accept is not None:
            accept(folder, others)
        state: dict[str, Any] = {"state_dict": get_model_state_dict(model, options=TRAINED)}
        _load(state, folder)
        model.load_state_dict(state["state_dict"], strict=False)  # without what is frozen, which is there already
        for index, optimizer in enumerate(optimizers):
            state = {f"optimizer_{index}": get_optimizer_state_dict(model, optimizer)}
            _load(state, folder)
            # as on the host, so that numbers such as Adam's step stay there
            options = StateDictOptions(cpu_offload=True)
            set_optimizer_state_dict(model, optimizer, optim_state_dict=state[f"optimizer_{index}"], options=options)
    except RLPlugError:
        raise
    except READ_ERRORS as error:
        raise RunError(
            f"checkpoint {folder} cannot be loaded into this run: {_first_reason(error)}. Resume with the model, "
            "critic, optimizer and optimizations that it was written with."
        ) from error
    return others


def _load(state: dict[str, Any], folder: Path) -> None:
    load(state, storage_reader=_PlainReader(folder), planner=_PlainPlanner())


def _first_reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = f"{str(error)[:300]}" if str(error) else type(error).__name__
    return " ".join(text.split()).rstrip(".")
