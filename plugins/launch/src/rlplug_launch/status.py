"""``rlplug launch --status RUN`` and ``--stop RUN``: without torch, from files of the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rlplug.errors import RunError
from rlplug.observability.terminal import make_table, say, show
from rlplug_launch.state import COLUMNS, LaunchState, ask_to_stop, is_alive

STOP_S: Final = 600.0


def show_status(run_folder: Path) -> bool:
    """Print the state of a launched run; return whether it runs or has finished.

    Raises:
        ConfigError: The folder is not that of a launched run.
    """
    state = LaunchState.read(run_folder)
    show(make_table(COLUMNS, state.rows(), f"{run_folder}, launched by {state.launcher}"))
    alive = is_alive(run_folder)
    say(state.describe(alive))
    return alive or state.status == "finished"


def stop(run_folder: Path) -> None:
    """Have a launched run save and stop, and wait for that.

    Raises:
        ConfigError: The folder is not that of a launched run.
        RunError: It did not stop.
    """
    if not LaunchState.read(run_folder).has_ended:
        say("asking the driver to stop: the trainer saves first")
    state = ask_to_stop(run_folder, STOP_S)
    if not state.has_ended and is_alive(run_folder):
        raise RunError(f"{run_folder} still runs after {STOP_S:g} s: see its logs.")
    say(state.describe(is_alive=False))
