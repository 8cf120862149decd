"""Command line ``rlplug``. Each command imports what it needs: torch takes seconds, and ``--help`` needs none."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rlplug.distributed.stop_signal import SignalExit, exit_at_once
from rlplug.errors import ConfigError, RLPlugError, causes_of, describe

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2

COMMANDS: Final = (
    "fit",
    "validate",
    "eval",
    "chat",
    "export",
    "launch",
    "plan",
    "plugins",
    "new-plugin",
    "doctor",
    "report",
    "watch",
    "completion",
)

WITHOUT_PLUGINS: Final = {
    "new-plugin": "rlplug.cli.new_plugin:new_plugin_command",
    "report": "rlplug.cli.commands.report:report_command",
    "watch": "rlplug.cli.commands.watch:watch_command",
    "completion": "rlplug.cli.commands.completion:completion_command",
}
WITH_PLUGINS: Final = {
    "eval": "rlplug.cli.commands.evaluate:eval_command",
    "chat": "rlplug.cli.commands.chat:chat_command",
    "export": "rlplug.cli.commands.export:export_command",
    "launch": "rlplug.cli.commands.launch:launch_command",
}
"""Functions that carry out commands, imported when they are called; they return the exit status, or nothing for 0."""

DESCRIPTION: Final = """reinforcement-learning post-training of language models as PyTorch Lightning plugins

  rlplug fit -c configs/quickstart.yaml          train; later -c files and --key value override earlier ones
  rlplug fit --resume runs/quickstart/001        go on with a run that was stopped, from its newest checkpoint
  rlplug validate -c CONFIG --ckpt_path PATH     score held-out prompts
  rlplug eval runs/quickstart/001 --base         pass@k of finished policies, with intervals, and a page that compares
  rlplug chat RUN                                talk to a policy, with the tools of its environment
  rlplug export RUN --push-to-hub NAME           a run's policy as a Hugging Face folder with a model card; upload it
  rlplug launch -c CONFIG --launcher slurm       train on one or many hosts, with engine servers; also: local, ray
  rlplug plan -c CONFIG --gpu-gib 80             what will live on each GPU, without one; does it fit?
  rlplug plugins                                 what is installed; --check shows what fails, --run RUN what hooks cost
  rlplug new-plugin NAME --kind reward           write a package with a plugin of your own; seven kinds
  rlplug doctor                                  what is wrong with this machine, packages and plugins, and what to do
  rlplug report runs/quickstart/001              write report.html from a run folder
  rlplug watch runs                              follow runs as they go, and compare them, on a local page
  rlplug completion bash                         print a script that completes commands and keys; also for zsh
  rlplug --version                               print the version

Keys of a configuration: rlplug fit --help, and with Lightning's Trainer rlplug fit --help-all; of one class:
rlplug fit --model.algorithm.help GRPO
"""

PLAN_DESCRIPTION: Final = """what will live on each GPU in each phase of a step, and whether it fits; nothing is loaded

  -c, --config CONFIG    and all other options of rlplug fit: see rlplug fit --help
  --gpu-gib GIB          memory of each GPU; by default that of this machine's first
  --network-gbit-s GBIT  speed of each host's network, to estimate the seconds of a weight sync between hosts
  --split-gpus N         how to divide N GPUs between engines and trainer of an asynchronous run, by measured rates:
  --rates RUN            those of a run's folder; or
  --engine-tokens-s R --trainer-tokens-s R   completion tokens a second of one GPU

Exit status 1: it does not fit, and the smallest change that makes it fit is printed.
"""


LAUNCH_DESCRIPTION: Final = """start a run on one or many hosts, with engine servers beside it

  -c, --config CONFIG    and all other options of rlplug fit: see rlplug fit --help; the section `launch` says the rest
  --launcher NAME        local (the default), slurm, or one of a plugin; --launch.launcher takes its options too
  --launch.KEY VALUE     overrides a key of the section: rlplug launch --help-all lists them
  --dry-run              print where everything would run, or the job's script, and start nothing
  --resume RUN           go on with a run, with the launch options that it had
  --status RUN           show the tasks of a run that was launched, such as runs/quickstart/001
  --stop RUN             have it save and stop
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status; errors print as one message unless ``--debug``."""
    exit_at_once()
    is_process = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(f"usage: rlplug [--debug] [--block PLUGIN] {{{','.join(COMMANDS)}}} ...\n\n{DESCRIPTION}")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(f"rlplug {version('rlplug')}")
        return 0
    debug = _take_flag(arguments, "--debug")
    if _command_of(arguments) == "doctor":
        return _doctor_command(arguments)  # before packages are imported that may be missing
    from rlplug.observability.start import note_process_start
    from rlplug.observability.terminal import guarded, visible

    if is_process:
        note_process_start()
    with guarded():
        try:
            blocked = _take_values(arguments, "--block", "the name of a plugin")
            return _run(arguments, blocked)
        except RLPlugError as error:
            if debug:
                traceback.print_exc()
            else:
                print(f"rlplug: {visible(str(error))}", file=sys.stderr)
            return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_ERROR
        except BrokenPipeError:  # the reader of a pipe, such as head, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_ERROR
        except Exception as error:  # noqa: BLE001 - printed here, where what it quotes is not obeyed by the terminal
            if ends := [cause for cause in causes_of(error) if isinstance(cause, SignalExit)]:
                raise ends[0] from None  # the code that the signal interrupted has turned it into an error
            print(_failure(error), file=sys.stderr)
            traceback.print_exc()
            return EXIT_ERROR


def _failure(error: Exception) -> str:
    """Return whose an unexpected error is, to be printed above its traceback: a plugin's, or the core's."""
    from rlplug.interfaces.checks.calls import failed_call
    from rlplug.observability.terminal import visible

    call, problem = failed_call(error), visible(describe(error, with_line=True))
    if call is None:
        return f"rlplug: {problem}: an error of rlplug, or of a library that it calls. Its traceback:"
    return f"rlplug: {visible(str(call))} raised {problem}. Its traceback:"


def _run(arguments: list[str], blocked: list[str]) -> int:
    command, rest = (arguments[0] if arguments else ""), arguments[1:]
    if command not in COMMANDS:
        raise ConfigError(f"there is no command {command!r}: use {', '.join(COMMANDS[:-1])} or {COMMANDS[-1]}.")
    if command == "plugins":
        from rlplug.cli.commands.plugins import plugins_command

        with _uncollected_imports():
            return 0 if plugins_command(rest, blocked) else EXIT_ERROR
    if command in WITHOUT_PLUGINS:
        return _call(WITHOUT_PLUGINS[command], rest)
    if command == "plan" and {"-h", "--help"} & set(arguments):
        print(f"usage: rlplug plan [--gpu-gib GIB] [--network-gbit-s GBIT] -c CONFIG ...\n\n{PLAN_DESCRIPTION}")
        return 0
    if command == "launch" and (done := _launch_without_torch(rest)) is not None:
        return done
    with _uncollected_imports():
        from rlplug.plugin_manager import BLOCK_VARIABLE, PluginManager, use_plugins

        sys.path.insert(0, os.getcwd())  # so that a reward function next to the configuration can be named
        manager = use_plugins(PluginManager(blocked))
    os.environ[BLOCK_VARIABLE] = ",".join(manager.blocked)  # for the ranks that Lightning starts
    if command == "plan":
        return _plan_command(rest)
    if command in WITH_PLUGINS:
        return _call(WITH_PLUGINS[command], rest)
    from rlplug.cli.lightning_cli import run_lightning

    return run_lightning(arguments)


@contextmanager
def _uncollected_imports() -> Iterator[None]:
    """Import torch and the plugins without garbage collections, and let later ones skip what was imported.

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


def _call(place: str, arguments: list[str]) -> int:
    module, _, function = place.partition(":")
    status: int | None = getattr(importlib.import_module(module), function)(arguments)
    return status or 0


def _launch_without_torch(arguments: list[str]) -> int | None:
    """Carry out what needs no torch, and return the exit status; ``None`` when it is a run."""
    if {"-h", "--help"} & set(arguments):
        print(f"usage: rlplug launch -c CONFIG [--launcher NAME] [--dry-run] ...\n\n{LAUNCH_DESCRIPTION}")
        return 0
    of_status, of_stop = (_take_values(arguments, f"--{name}", "the folder of a run") for name in ("status", "stop"))
    if not of_status and not of_stop:
        return None
    if arguments or len(of_status) + len(of_stop) > 1:
        raise ConfigError("--status RUN and --stop RUN stand alone: give one of them, and nothing else.")
    from rlplug.launch.status import show_status, stop

    if of_stop:
        stop(Path(of_stop[0]))
        return 0
    return 0 if show_status(Path(of_status[0])) else EXIT_ERROR


def _command_of(arguments: list[str]) -> str:
    words = iter(arguments)
    for word in words:
        if word != "--block":
            return word
        next(words, "")
    return ""


def _doctor_command(arguments: list[str]) -> int:
    from rlplug.cli.doctor import doctor_command

    try:
        blocked = _take_values(arguments, "--block", "the name of a plugin")
    except ConfigError as error:
        print(f"rlplug: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0 if doctor_command(arguments[1:], blocked) else EXIT_ERROR


def _plan_command(arguments: list[str]) -> int:
    gpu_gib = _take_values(arguments, "--gpu-gib", "a number of GiB, such as 80")
    network = _take_values(arguments, "--network-gbit-s", "a number of Gbit/s, such as 400")
    what = {"split-gpus": "a number of GPUs", "rates": "the folder of a run"}
    what |= {f"{side}-tokens-s": "tokens per second of one GPU" for side in ("engine", "trainer")}
    split = {name: values[-1] for name in what if (values := _take_values(arguments, f"--{name}", what[name]))}
    from rlplug.cli.commands.plan import plan_command

    gib, gbit_s = (values[-1] if values else None for values in (gpu_gib, network))
    return 0 if plan_command(arguments, gib, gbit_s, split) else EXIT_ERROR


def _take_flag(arguments: list[str], flag: str) -> bool:
    if flag not in arguments:
        return False
    arguments.remove(flag)
    return True


def _take_values(arguments: list[str], option: str, what: str) -> list[str]:
    """Remove every ``option VALUE`` from ``arguments`` and return the values; ``what`` describes them in errors."""
    values = []
    while option in arguments:
        index = arguments.index(option)
        if index + 1 == len(arguments):
            raise ConfigError(f"{option} needs {what}.")
        values.append(arguments[index + 1])
        del arguments[index : index + 2]
    return values
