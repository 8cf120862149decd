"""Runs the command line once: ``python one_run.py DISTURBANCES argument ...``, with a JSON object that may have

- ``"signal": "SIGKILL", "phase": "update", "step": 4``: the process sends itself the signal on entering that phase
  (with ``"rank": 1``, only that rank does)
- ``"max_file_bytes": 100000``: the kernel refuses to let a file of the process grow past that
- ``"stdin": "hello\\n"``: what the process reads from its stdin
- ``"hold_write": "step-00000004"``: the write of that checkpoint does not end before the process does; a signal waits
  until all ranks have written their parts of it
"""

import io
import json
import os
import resource
import signal
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter

from rlplug.cli.main import main
from rlplug.observability.phase_timer import PhaseTimer

COMMAND = str(Path(sys.executable).with_name("rlplug"))
"""What a run's further processes are started with."""


HELD = "held"
"""File in the folder of a checkpoint whose write is held."""


def send_signal_in(phase: str, step: int, number: signal.Signals, waits: bool) -> None:
    """Let this process signal itself on entering a phase in its ``step``-th step; if it waits, once a write is held."""
    entered: list[str] = []
    original = PhaseTimer.phase

    def watched(self: PhaseTimer, name: str) -> AbstractContextManager[None]:
        entered.append(name)
        if name == phase and entered.count("prompts") == step:
            while waits and not is_held():
                time.sleep(0.05)
            os.kill(os.getpid(), number)
        return original(self, name)

    PhaseTimer.phase = watched  # type: ignore[method-assign]


def is_held() -> bool:
    """Return whether the write of one of the run's checkpoints is held."""
    run_dir = Path(sys.argv[sys.argv.index("--run.dir") + 1])
    return any(run_dir.glob(f"*/checkpoints/*/{HELD}"))


def hold_write(name: str) -> None:
    """Let the last part of the write of a checkpoint, which rank 0 does after all others, take for ever."""
    original = FileSystemWriter.finish

    def held(self: FileSystemWriter, *arguments: object, **keywords: object) -> None:
        if name in str(self.path):
            (Path(self.path) / HELD).touch()
            time.sleep(3600)
        original(self, *arguments, **keywords)  # type: ignore[arg-type]

    FileSystemWriter.finish = held  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    disturbances = json.loads(sys.argv[1])
    if "max_file_bytes" in disturbances:
        resource.setrlimit(resource.RLIMIT_FSIZE, (disturbances["max_file_bytes"], disturbances["max_file_bytes"]))
    if "signal" in disturbances and disturbances.get("rank") in (None, int(os.environ.get("LOCAL_RANK", "0"))):
        send_signal_in(
            disturbances["phase"],
            disturbances["step"],
            signal.Signals[disturbances["signal"]],
            waits="hold_write" in disturbances,
        )
    if "stdin" in disturbances:
        sys.stdin = io.StringIO(disturbances["stdin"])
    if "hold_write" in disturbances:
        hold_write(disturbances["hold_write"])
    sys.argv = [COMMAND, *sys.argv[2:]]
    sys.exit(main())
