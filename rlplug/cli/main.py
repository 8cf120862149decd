"""Command line ``rlplug``. A command is imported when it is called: torch takes seconds, and ``--help`` needs none."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from typing import Any, Final

from rlplug.cli.command_parser import take_option
from rlplug.cli.find_commands import find_commands, load_command, summary_of, uncollected_imports
from rlplug.distributed.stop_signal import SignalExit, exit_at_once
from rlplug.errors import ConfigError, RLPlugError, causes_of
from rlplug.plugin_names import BLOCK_VARIABLE, LOCAL_VARIABLE, blocked_names, local_names

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2

_IMPORT_ENDS: Final = "ends the process while it is imported: remove that, or put it below if __name__ == '__main__'."
_LOOK_ALIKE: Final = re.compile(r"(?<=[A-Za-z_])[\u0370-\u052f]|[\u0370-\u052f](?=[A-Za-z_])")  # Greek and Cyrillic
DESCRIPTION: Final = """reinforcement-learning post-training of language models as PyTorch Lightning plugins

  rlplug fit --policy P --train FILE --reward R  train a model on prompts of yours
  rlplug fit -c configs/quickstart.yaml          train; later -c files and --key value override earlier ones
  rlplug fit --resume runs/quickstart/001        go on with a run that was stopped, from its newest checkpoint
"""
EPILOGUE: Final = """
Options of a command: rlplug COMMAND --help. All keys of a configuration: rlplug fit --help=all; of one class: rlplug
fit --model.algorithm.help GRPO
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status; errors print as one message unless ``--debug``."""
    exit_at_once()
    is_process = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in ([], ["-h"], ["--help"]):
        _print(help_text())
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        _print(f"rlplug {version('rlplug')}")
        return 0
    arguments = ["--help-all" if argument == "--help=all" else argument for argument in arguments]
    if debug := "--debug" in arguments:
        arguments.remove("--debug")
    with terminal.guarded() if (terminal := _terminal()) else nullcontext():
        try:
            arguments, blocked = take_option(arguments, "--block")
            arguments, local = take_option(arguments, "-p")
            if "" in blocked:
                raise ConfigError("--block needs the name of a plugin.")
            if any(not all(part.isidentifier() for part in name.split(".")) for name in local):
                raise ConfigError("-p needs the name of a module with hooks, such as my_hooks for my_hooks.py.")
            with _chosen_plugins({BLOCK_VARIABLE: blocked_names(blocked), LOCAL_VARIABLE: local_names(local)}):
                return _run(arguments, is_process)
        except RLPlugError as error:
            if debug:
                traceback.print_exc()
            else:
                print(f"rlplug: {_visible(str(error))}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR
        except SystemExit as error:
            codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if isinstance(error, SignalExit) or not (imported := [c for c in codes if c.co_name == "<module>"]):
                raise
            print(f"rlplug: {_visible(imported[-1].co_filename)} {_IMPORT_ENDS}", file=sys.stderr)
            return EXIT_USAGE
        except BrokenPipeError:
            _leave_pipe()
            return EXIT_ERROR
        except Exception as error:  # noqa: BLE001 - printed here, where what it quotes is not obeyed by the terminal
            if ends := [cause for cause in causes_of(error) if isinstance(cause, SignalExit)]:
                raise ends[0] from None  # the code that the signal interrupted has turned it into an error
            from rlplug.cli.messages import explain_failure

            whose, has_traceback = explain_failure(error)
            print(f"rlplug: {_visible(whose)}", file=sys.stderr)
            if has_traceback or debug:
                traceback.print_exc()
            return EXIT_ERROR


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _leave_pipe()


def _leave_pipe() -> None:
    """Write no more to a pipe whose reader, such as ``head``, has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def help_text() -> str:
    """Return the help of ``rlplug``: a line for each installed command."""
    commands = find_commands()
    width = max(map(len, commands), default=0)
    lines = [f"  {name:{width}}  {summary_of(command)}" for name, command in commands.items()]
    usage = "usage: rlplug [--debug] [--block PLUGIN] [-p MODULE] [--version] COMMAND ..."
    return "\n".join([usage, "", DESCRIPTION, "commands:", *lines, EPILOGUE])


@contextmanager
def _chosen_plugins(names: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Set the variables of blocked and local plugins in the body, for the processes that it starts too: other ranks."""
    before = {variable: os.environ.get(variable) for variable in names}
    os.environ.update({variable: ",".join(each) for variable, each in names.items()})
    try:
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable)
            if value is not None:
                os.environ[variable] = value


def _run(arguments: list[str], is_process: bool) -> int:
    """Import the command and carry it out, with a new plugin manager if it asks for one."""
    if (manager := sys.modules.get("rlplug.plugin_manager")) is not None:
        manager.forget_plugins()
    if is_process:
        with suppress(ImportError):
            importlib.import_module("rlplug.observability.start").note_process_start()
    name, *given = arguments or [""]
    with uncollected_imports():
        command = load_command(name, given)
    return command(given) or 0


# ---- what needs a package that may be missing, so that rlplug doctor can say so -------------------------------------


def _terminal() -> Any:
    """Return the module of the terminal, or ``None`` where rich is missing."""
    try:
        return importlib.import_module("rlplug.observability.terminal")
    except ImportError:
        return None


def _visible(text: str) -> str:
    text = _LOOK_ALIKE.sub(lambda found: ascii(found[0])[1:-1], text)
    return str(terminal.visible(text)) if (terminal := _terminal()) else text.encode("unicode_escape").decode()
