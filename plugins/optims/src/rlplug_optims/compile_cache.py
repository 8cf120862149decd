"""The folder in which compiled code is kept between runs: torch.compile's, Triton's, and the rollout engine's."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import RolloutEngine

KEY: Final = "run.compile_cache"
INDUCTOR: Final = "TORCHINDUCTOR_CACHE_DIR"
VARIABLES: Final[Mapping[str, str]] = {INDUCTOR: "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variables of torch.compile and Triton, and the folders below the cache's that they name."""


class CompileCache:
    """What ``run.compile_cache`` asks for; ``note`` says what took effect, in one line."""

    def __init__(self, folder: str, engine: RolloutEngine, is_default: bool) -> None:
        self.note = use_compile_cache(folder, engine, is_default)


def use_compile_cache(folder: str, engine: RolloutEngine, is_default: bool = False) -> str:
    """Keep what is compiled from now on, in this process and in those that it starts, below a folder.

    Torch and Triton look at their variables when they compile; an engine's library may do so when it is imported, which
    comes later. A variable that the environment has already stays as it is.

    Args:
        folder: ``run.compile_cache``.
        engine: Its class says which variables its library has.
        is_default: Whether nobody asked for that folder: where it cannot be written, all is left to the libraries.

    Returns:
        What took effect, in one line.

    Raises:
        ConfigError: Nothing can be written there, or others can, and it is not the default.
        RunError: The engine's class names variables or folders that are none.
    """
    names = {**VARIABLES, **_of_engine(engine)}
    given = {name: os.environ[name] for name in names if _is_given(name)}
    try:
        place = Path(folder).expanduser().absolute()
        ours = {name: place / below for name, below in names.items() if name not in given}
        for path in ours.values():
            _require_own(path, place)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        if is_default:
            return f"compiled code is not kept for later runs: {KEY} is {folder}: {reason}"
        raise ConfigError(
            f"{KEY} is {folder}, which cannot be used: {reason}. Name a folder of your own, or set null, "
            "which leaves compiled code where torch and the engine put it."
        ) from error
    os.environ.update({name: str(path) for name, path in ours.items()})
    kept = f"compiled code is kept in {place} ({', '.join(ours)})" if ours else f"{KEY} is not used"
    of_environment = "".join(f"; {name} of the environment is {value}" for name, value in given.items())
    return kept + of_environment


def _is_given(name: str) -> bool:
    """Return whether the environment had a variable before torch, which sets its own to its default when imported."""
    value = os.environ.get(name)
    if name == INDUCTOR and value == os.path.abspath(default_cache_dir()):
        return False
    return bool(value)


def _of_engine(engine: RolloutEngine) -> Mapping[str, str]:
    found = engine.compile_cache_variables
    owner = f"{type(engine).__module__}.{type(engine).__name__}.compile_cache_variables"
    if not isinstance(found, Mapping):
        raise RunError(f"{owner} must be a mapping of environment variables to folders; it is {found!r}.")
    for name, below in found.items():
        path = PurePosixPath(below) if isinstance(below, str) else PurePosixPath("/")
        if not isinstance(name, str) or not name.isidentifier() or path.is_absolute() or ".." in path.parts:
            raise RunError(f"{owner} must name variables, and folders below the cache's; it has {name!r}: {below!r}.")
    return found


def _require_own(path: Path, place: Path) -> None:
    """Make a folder below ``place`` in which this user can write, and nobody else: what is in it is executed."""
    for folder in (*reversed(path.parents), path):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
        folder.mkdir(exist_ok=True, mode=0o700)  # parents=True would ask the umask above it
        found = folder.stat()
        if folder.is_relative_to(place) and (found.st_uid != os.geteuid() or found.st_mode & 0o002):
            raise PermissionError(f"{folder} is another user's, or all may write to it, and what is in it is executed")
    with tempfile.TemporaryFile(dir=path):
        pass
