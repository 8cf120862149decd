"""Calls of plugins' parts, as messages name them: class and method, distribution and version."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from rlplug import interfaces
from rlplug.errors import RunError

PARTS: Final = (
    *("RolloutEngine", "Algorithm", "Reward", "Environment", "Optimization", "ModelTrainer", "RunObserver"),
)
"""Base classes of parts, of ``rlplug.interfaces``."""
CORE: Final = "rlplug"
HOOK_PREFIX: Final = "rlplug_"


@dataclass(frozen=True)
class PluginCall:
    """A call that the core makes of a part; as text ``MyAlgorithm.advantages of my-plugin 1.2``."""

    part: Any
    """The object or class, the function of a hook, or the text of a call on another rank."""
    method: str = ""
    """Name of the method; empty for a function."""

    def __str__(self) -> str:
        if isinstance(self.part, str):
            return self.part
        named = self.part if hasattr(self.part, "__qualname__") else type(self.part)
        return f"{'.'.join(filter(None, (named.__name__, self.method)))}{owner_of(named.__module__)}"

    @property
    def is_of_core(self) -> bool:
        """Whether the part is one of rlplug's own."""
        named = self.part if hasattr(self.part, "__qualname__") else type(self.part)
        return str(named.__module__).partition(".")[0] == CORE

    def violation(self, must: str, did: str, kind: type[RunError] = RunError) -> RunError:
        """Return the error that says what the call must do, and what it did: ``must return 4 numbers; it ...``."""
        return kind(f"{self} must {must}; it {did}.")


def owner_of(module: str) -> str:
    """Return the distribution of a module and its version, as `` of NAME VERSION``; else its file, or nothing.

    A file in the current folder, or below it, is named from there.

    It reads the metadata of what is installed, so only messages ask for it.
    """
    found = sys.modules.get(module)
    package = module.partition(".")[0]
    if (distribution := _distribution_of(package)) is not None:
        return f" of {distribution}"
    file = getattr(found, "__file__", None)
    if not file:
        return ""
    path = Path(file)
    with suppress(OSError, ValueError):  # there is no current folder, or the file is elsewhere
        path = path.relative_to(Path.cwd())
    return f" in {path}"


@functools.cache
def _distribution_of(package: str) -> str | None:
    if package == CORE:
        return f"{CORE} {version(CORE)}"
    for point in entry_points(group="rlplug.plugins"):
        if point.dist is not None and point.value.partition(":")[0].strip().partition(".")[0] == package:
            return f"{point.dist.name} {point.dist.version}"
    names = packages_distributions().get(package, [])
    return f"{names[0]} {version(names[0])}" if names else None


def failed_call(error: BaseException) -> PluginCall | None:
    """Return the call of a plugin's part in which an exception was raised; ``None`` where it was in the core."""
    return _first_call(_frames_of(error.__traceback__))


def running_call(frame: FrameType) -> PluginCall | None:
    """Return the call of a plugin's part that a stack is in; ``None`` where it is in the core."""
    frames: list[FrameType] = []
    current: FrameType | None = frame
    while current is not None:
        frames.append(current)
        current = current.f_back
    return _first_call(reversed(frames))


def _frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _first_call(frames: Iterator[FrameType]) -> PluginCall | None:
    """Return the outermost call of a method of a part, or of a hook, that is not the core's own."""
    bases = tuple(getattr(interfaces, name) for name in PARTS)
    for frame in frames:
        name, part = frame.f_code.co_name, frame.f_locals.get("self")
        module = str(frame.f_globals.get("__name__", ""))
        if isinstance(part, bases) and type(part).__module__.partition(".")[0] != CORE:
            return PluginCall(part, name)
        if name.startswith(HOOK_PREFIX) and module.partition(".")[0] != CORE:
            return PluginCall(frame.f_globals.get(name, type(name, (), {"__module__": module})))
    return None
