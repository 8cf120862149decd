"""Runs the command line several times in forked children of one process, which pays for the imports once.

``python forked_runs.py jobs.json`` reads a list of ``{"arguments": [...], "output": "file"}`` and prints the exit codes
as a JSON list; a child that a signal ended has its negative number. Besides, a job can have

- ``"signal": "SIGKILL", "phase": "update", "step": 4``: the child sends itself the signal on entering that phase
- ``"max_file_bytes": 100000``: the kernel refuses to let a file of the child grow past that
"""

import json
import os
import resource
import signal
import sys
import traceback
from contextlib import AbstractContextManager
from pathlib import Path

import torch.utils.tensorboard  # noqa: F401 - these two imports take the time

import rlplug.cli.lightning_cli  # noqa: F401
from rlplug.cli.main import main
from rlplug.observability.phase_timer import PhaseTimer

COMMAND = str(Path(sys.executable).with_name("rlplug"))
"""What a run's further processes are started with."""


def send_signal_in(phase: str, step: int, number: signal.Signals) -> None:
    """Let this process signal itself on entering ``phase`` in its ``step``-th step."""
    entered: list[str] = []
    original = PhaseTimer.phase

    def watched(self: PhaseTimer, name: str) -> AbstractContextManager[None]:
        entered.append(name)
        if name == phase and entered.count("prompts") == step:
            os.kill(os.getpid(), number)
        return original(self, name)

    PhaseTimer.phase = watched  # type: ignore[method-assign]


def run_in_child(job: dict) -> int:  # type: ignore[type-arg]
    """Run one job in a forked child and return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if "max_file_bytes" in job:
                resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_file_bytes"], job["max_file_bytes"]))
            if "signal" in job:
                send_signal_in(job["phase"], job["step"], signal.Signals[job["signal"]])
            sys.argv = [COMMAND, *job["arguments"]]
            code = main()
        except SystemExit as ending:  # --help and its like
            code = int(ending.code or 0)
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
    print("exit codes:", json.dumps(codes))
