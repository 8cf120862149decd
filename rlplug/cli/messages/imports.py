"""Explanations of import paths in a configuration, ``package.Class``, that give no class of the wanted kind."""

from __future__ import annotations

import os
import re
import traceback
from types import FrameType
from typing import Final

from rlplug.errors import ConfigError, causes_of, describe, did_you_mean
from rlplug.plugin_names import distribution_of

_WRONG_CLASS: Final = re.compile(
    r"(?:Import path |.*Expected '|\")([^\s'\"]+)(?: does not correspond to|' to be|\" is not) "
    r"a (subclass of|function that returns) (.+?)\.*(?: Got value: .*)?$"
)
_ABSTRACT: Final = re.compile(r"Expected an instantiatable class, but (\S+) is abstract")


def explain_import(error: BaseException | None) -> str | None:
    """Return which import path could not be imported and why, or ``None`` where no import failed.

    Args:
        error: What jsonargparse raised; the exception of the import is among its causes.
    """
    for cause in causes_of(error):
        if isinstance(cause, ConfigError):  # of the parser of a class's options, which has explained it
            return None
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if frame.f_code.co_name == "import_object":  # jsonargparse's, whose messages leave the path out
                path = frame.f_locals.get("name")
                return _explain_path(path, cause, frame) if isinstance(path, str) and "." in path else None
    return None


def explain_wrong_class(reason: str) -> str | None:
    """Return what is wrong with a class that was imported, or ``None`` where jsonargparse's ``reason`` is another."""
    if found := _ABSTRACT.match(reason):
        return f"{found[1]!r} is abstract: give the import path of a subclass."
    if found := _WRONG_CLASS.match(reason):
        wanted = re.sub(r"Union\[(.*)\]", lambda union: union[1].replace(", ", " or "), found[3])
        wanted = re.sub(r"<class '([^']+)'>", r"\1", wanted)
        return f"{found[1]!r} is no {found[2]} {wanted}: give the import path of one."
    return None


def _explain_path(path: str, cause: BaseException, importer: FrameType) -> str:
    if not all(part.isidentifier() for part in path.split(".")):
        return f"{path!r} is no import path: give package.Class."
    name = path.rpartition(".")[2]
    if path.startswith("rlplug.") and (distribution := distribution_of("classes", name)) is not None:
        return f"{path!r} has moved: write {name} alone, which {distribution} brings (pip install {distribution})."
    context = cause.__context__
    if isinstance(cause, AttributeError) and isinstance(context, ModuleNotFoundError) and not _is_of(path, context):
        cause = context  # package.module exists, and imports a module that does not
    return f"{path!r} cannot be imported: {_reason(path, cause, importer)}"


def _reason(path: str, cause: BaseException, importer: FrameType) -> str:
    """Return why the import of ``path`` raised ``cause``, and what to do."""
    if isinstance(cause, ModuleNotFoundError) and _is_of(path, cause):
        return (
            f"there is no module {cause.name!r}. Correct the path, install the package, or run rlplug in the folder "
            "that has it."
        )
    if isinstance(cause, SyntaxError):
        return f"{os.path.basename(cause.filename or '')}:{cause.lineno}: {cause.msg}. Correct the file."
    *_, (last, _) = traceback.walk_tb(cause.__traceback__)
    if isinstance(cause, AttributeError) and (last is importer or last.f_code.co_name == "__getattr__"):
        owner = getattr(cause.obj, "__name__", path.rpartition(".")[0])
        near = did_you_mean(str(cause.name), getattr(cause.obj, "__all__", dir(cause.obj)))
        return f"{owner} has no {cause.name!r}.{near or ' Correct the name.'}"
    fix = "Install what it imports" if isinstance(cause, ModuleNotFoundError) else "Correct the module"
    return f"its module raises {' '.join(describe(cause, with_line=True).split())}. {fix}."


def _is_of(path: str, missing: ModuleNotFoundError) -> bool:
    """Return whether the module that is missing is the one of ``path``, or a package that holds it."""
    return f"{path}.".startswith(f"{missing.name}.")
