"""Runs the command line several times in forked children of one process, which pays for the imports once.

``python forked_runs.py jobs.json``: a list of ``{"arguments": [...], "signal": "SIGKILL", "phase": "update",
"step": 4}``; with a signal, the child sends it to itself on entering that phase of that step. Prints the exit codes as
a JSON list; a child that a signal ended has its negative number.
"""

import json
import os
import signal
import sys
import traceback
from contextlib import AbstractContextManager
from pathlib import Path

import torch.utils.tensorboard  # noqa: F401 - these two imports take the time

import rlplug.lightning_cli  # noqa: F401
from rlplug.cli import main
from rlplug.phases import PhaseClock


def send_signal_in(phase: str, step: int, number: signal.Signals) -> None:
    """Let this process signal itself on entering ``phase`` in its ``step``-th step."""
    entered: list[str] = []
    original = PhaseClock.phase

    def watched(self: PhaseClock, name: str) -> AbstractContextManager[None]:
        entered.append(name)
        if name == phase and entered.count("prompts") == step:
            os.kill(os.getpid(), number)
        return original(self, name)

    PhaseClock.phase = watched  # type: ignore[method-assign]


def run_in_child(job: dict) -> int:  # type: ignore[type-arg]
    """Run one job in a forked child and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if "signal" in job:
                send_signal_in(job["phase"], job["step"], signal.Signals[job["signal"]])
            sys.argv = ["rlplug", *job["arguments"]]
            code = main()
        except BaseException:  # noqa: BLE001 - the child must not return into the parent's loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    codes = [run_in_child(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    print("\nexit codes:", json.dumps(codes))
