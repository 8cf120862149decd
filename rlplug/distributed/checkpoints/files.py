"""Files of checkpoints: their names, where they lie in a run's folder, and their checksums.

A checkpoint is a folder with the tensors as ``torch.distributed.checkpoint`` (DCP) writes them, all else in
``meta.pt``, the configuration, and ``manifest.json``, which is written last and has a checksum of each other file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash
from torch.distributed.checkpoint.state_dict import StateDictOptions

TRAINED: Final = StateDictOptions(ignore_frozen_params=True)
"""What a checkpoint holds of a model: frozen weights, such as those under adapters, are in the model's folder."""
OTHERS: Final = "meta.pt"
"""File of all but the tensors."""
TENSORS: Final = ".metadata"
"""File of DCP that says where in the other files each tensor is."""
CONFIG: Final = "config.yaml"
CONFIG_KEY: Final = "rlplug_config"
"""Key of a checkpoint with the text of its file ``config.yaml``."""
MANIFEST: Final = "manifest.json"
FOLDER: Final = "checkpoints"
EXPORTED: Final = ("policy", "adapter")
"""Folders of the trained policy, and of its adapter where one was trained."""
_SECRETS: Final = r"api_?key|password|passwd|secret(?:_key)?|(?:access|api|auth|bearer|hf|hub)_token"
_IN_CLEAR: Final = re.compile(
    rf"(?i)(?:^|[_\W])(?:{_SECRETS}): ['\"]?(?!null\b|\$\{{)[^\s'\"]|://[^/\s:@]+:[^/\s@]+@", re.M
)
_CHUNK: Final = 1 << 22
_NAME: Final = re.compile(r"step-(\d{8})")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run_dir / FOLDER).glob("step-*") if _NAME.fullmatch(path.name))


def has_key(config: str) -> bool:
    """Return whether a configuration has a secret in clear, as loggers take them, where ``${NAME}`` would do."""
    return _IN_CLEAR.search(config) is not None


def run_dir_of(checkpoint: str | Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, or None when it lies elsewhere."""
    path = Path(checkpoint)
    is_ours = _NAME.fullmatch(path.name) and path.parent.name == FOLDER
    return path.parent.parent if is_ours else None


@dataclass(frozen=True)
class FileDigest:
    """Length and checksum of a file."""

    name: str
    size: int
    xxh3: str
    """XXH3 of 128 bits, in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read a file and return its digest."""
        checksum, size = xxhash.xxh3_128(), 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                checksum.update(chunk)
                size += len(chunk)
        return cls(path.name, size, checksum.hexdigest())
