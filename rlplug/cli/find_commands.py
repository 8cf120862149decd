"""Commands of ``rlplug``, which distributions bring as entry points ``name = "module:function"`` of one group.

The function takes the arguments after the command's name and returns the exit status, or nothing for 0. The first line
of its docstring is the command's line in ``rlplug --help``, which imports none of them. Its module may have

    make_parser()                  the ``argparse`` parser of its options, which ``rlplug completion`` completes
    TAKES_CONFIGURATION = True     if it takes the keys of ``rlplug fit`` as well: they are checked before the import
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, TypeAlias

from rlplug.errors import ConfigError, PluginError, describe, did_you_mean
from rlplug.plugin_names import distribution_of

GROUP: Final = "rlplug.commands"
CORE: Final = "rlplug"

Command: TypeAlias = Callable[[list[str]], int | None]

_UNREADABLE: Final = (ImportError, OSError, ValueError, SyntaxError)


def find_commands() -> dict[str, EntryPoint]:
    """Return the installed commands by name, the core's first."""
    return {name: commands[0] for name, commands in _commands_by_name().items()}


def load_command(name: str, arguments: Sequence[str] = ()) -> Command:
    """Import a command; if it takes keys of ``rlplug fit``, once those in ``arguments`` and their classes are known.

    Raises:
        ConfigError: There is none, or no such key or class; the message says what to write or to install.
        PluginError: It cannot be imported, or two distributions bring it.
    """
    commands = _commands_by_name()
    if name not in commands:
        if distribution := distribution_of("commands", name):
            raise ConfigError(f"the command {name!r} comes with {distribution}: pip install {distribution}")
        near = did_you_mean(name, commands)
        raise ConfigError(f"there is no command {name!r}.{near} There are {', '.join(commands)}.")
    owner, *others = sorted({_owner(each) for each in commands[name]})
    if others:
        raise PluginError(f"{owner} and {others[0]} both bring the command {name!r}: uninstall one of them.")
    if _takes_configuration(commands[name][0]):
        from rlplug.cli.configuration.early_checks import check_early

        check_early(arguments)
    try:
        function: Command = commands[name][0].load()
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"the command {name!r} of {owner} cannot be imported: {describe(error)}. See rlplug doctor, or install "
            f"another version of {owner}."
        ) from error
    return function


def summary_of(command: EntryPoint) -> str:
    """Return the first line of the docstring of a command's function, from its source; only packages are imported."""
    try:
        nodes = ast.parse(_source(command)).body
    except _UNREADABLE as error:
        return f"cannot be read: {describe(error)}"
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == command.attr]
    return next(((ast.get_docstring(node) or "").partition("\n")[0] for node in found), "")


def _takes_configuration(command: EntryPoint) -> bool:
    """Return whether a command's source says so; one that cannot be read fails when it is imported."""
    with suppress(*_UNREADABLE):
        return re.search(r"^TAKES_CONFIGURATION\b", _source(command), re.MULTILINE) is not None
    return False


def _source(command: EntryPoint) -> str:
    """Return the text of a command's module."""
    spec = importlib.util.find_spec(command.module)
    return "" if spec is None else Path(str(spec.origin)).read_text(encoding="utf-8")


def _commands_by_name() -> dict[str, list[EntryPoint]]:
    """Return all that bring each command, from one look at the installed metadata, which takes milliseconds."""
    found: dict[str, list[EntryPoint]] = {}
    for command in sorted(entry_points(group=GROUP), key=lambda each: (_owner(each) != CORE, each.name, _owner(each))):
        found.setdefault(command.name, []).append(command)
    return found


def _owner(command: EntryPoint) -> str:
    return "" if command.dist is None else command.dist.name


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import a command without garbage collections, and let later ones skip what was imported.

    They took a sixth of the time of the imports, and modules are not freed. A process that has torch already is left as
    it is: its objects are not ours to exempt.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
