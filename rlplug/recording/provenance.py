"""What a run's numbers come from besides its configuration: prompts, model files, local code and versions."""

from __future__ import annotations

import gzip
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from rlplug.data.prompt_stream import fingerprint

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.data.datamodule import PromptDataModule

PROVENANCE: Final = "provenance"
"""Key of a checkpoint with it."""
ROWS: Final = "row_files"
"""Key of a checkpoint with the rows that the run had written."""
_MOST_ROW_BYTES: Final = 1 << 25
_STDLIB: Final = sysconfig.get_path("stdlib")
_BLOCKS: Final = 64
_BLOCK_BYTES: Final = 1 << 14
"""Of a larger file, such as one with weights, so many blocks of so many bytes are read, spread evenly."""


def provenance(config: RunConfig, data: PromptDataModule, versions: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return digests and versions by section and name, as a checkpoint keeps them; prompts are read by now."""
    models = {"model.policy": config.policy, "model.reference": config.reference}
    paths = {key: Path(model.path) for key, model in models.items() if model is not None}
    return {
        "data": {name: str(value)[:16] for name, value in flat(data.train_stream.state_dict()["fingerprint"])},
        "data.val": {name: str(value)[:16] for name, value in flat(fingerprint(data.val_prompts))},
        **{key: _model_files(path) for key, path in paths.items()},
        "code": _local_code(),
        "versions": dict(versions),
    }


class KeptRows:
    """Compressed bytes of files of rows; each checkpoint reads and compresses what is new alone, as one more member."""

    def __init__(self) -> None:
        self._packed: dict[Path, tuple[int, bytes]] = {}

    def of(self, paths: Iterable[Path]) -> dict[str, Tensor]:
        """Return the bytes, uint8, by name of the file, but not of a file that is absent or large."""
        found = {}
        for path in paths:
            if path.exists() and (size := path.stat().st_size) <= _MOST_ROW_BYTES:
                done, packed = self._packed.get(path, (0, b""))
                with path.open("rb") as file:
                    file.seek(done if done <= size else 0)  # somebody may have emptied it
                    packed += gzip.compress(file.read(), 1)
                    self._packed[path] = file.tell(), packed
                found[path.name] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return found


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their keys, joined by dots."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not parts and key:
        yield key, value
    for name, part in parts:
        yield from flat(part, f"{key}.{name}" if key else str(name))


def _model_files(path: Path) -> dict[str, str]:
    """Return a digest of each file of a model's folder, or of what the Hugging Face Hub's cache has of it."""
    if not path.is_dir():
        cached = try_to_load_from_cache(str(path), "config.json")
        path = Path(cached).parent if isinstance(cached, str) else path
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    return {file.name: _digest(file) for file in files if file.suffix in (".json", ".safetensors", ".jinja", ".model")}


def _local_code() -> dict[str, str]:
    """Return a digest of each imported file of Python that is of no library and not of rlplug, whose versions tell."""
    own = {}
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        is_library = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_STDLIB)
        is_rlplug = name.partition(".")[0].partition("_")[0] == "rlplug"
        if path.suffix == ".py" and path.is_file() and not is_library and not is_rlplug:
            here = path.is_relative_to(Path.cwd())
            own[str(path.relative_to(Path.cwd()) if here else path)] = _digest(path)
    return own


def _digest(path: Path) -> str:
    """Return the digest of a file's size and bytes, of a large file's blocks; of one that is gone, that it is."""
    try:
        size = path.stat().st_size
        found = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            if size <= _BLOCKS * _BLOCK_BYTES:
                found.update(file.read())
            for block in range(_BLOCKS) if size > _BLOCKS * _BLOCK_BYTES else ():
                file.seek((size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                found.update(file.read(_BLOCK_BYTES))
    except OSError:
        return "cannot be read"
    return found.hexdigest()[:16]
