"""Runs the command line on several ranks, each a forked child of one process, which pays for the imports once.

``python forked_ranks.py jobs.json`` reads jobs as ``forked_runs.py`` does and prints a list of exit codes for each. A
job's ``"num_ranks"`` is how many processes it gets, with torchrun's environment; the output of rank 0 goes to
``output``, that of others beside it. Besides, a job can have

- ``"copy": ["from", "to"]``: the folder is copied before the job begins
- ``"hold_write": "step-00000004"``: the write of that checkpoint does not end before the process does
"""

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

from forked_runs import run_in_child
from torch.distributed.checkpoint import FileSystemWriter


def hold_write(name: str) -> None:
    """Let the last part of the write of a checkpoint take for ever."""
    original = FileSystemWriter.finish

    def held(self: FileSystemWriter, *arguments: object, **keywords: object) -> None:
        if name in str(self.path):
            time.sleep(3600)
        original(self, *arguments, **keywords)  # type: ignore[arg-type]

    FileSystemWriter.finish = held  # type: ignore[method-assign, assignment]


def start_rank(job: dict, rank: int, port: int) -> int:  # type: ignore[type-arg]
    """Fork a process that runs the job as ``rank`` and ends with its exit code, and return the process's id."""
    child = os.fork()
    if child:
        return child
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job["num_ranks"]),
        "LOCAL_WORLD_SIZE": str(job["num_ranks"]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    if "hold_write" in job:
        hold_write(job["hold_write"])
    job["output"] += f".{rank}" if rank else ""
    code = run_in_child(job)
    os._exit(128 - code if code < 0 else code)  # as a shell says it


def run(job: dict) -> list[int]:  # type: ignore[type-arg]
    """Run a job on its ranks and return their exit codes."""
    if "copy" in job:
        shutil.copytree(*job["copy"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start_rank(job, rank, port) for rank in range(job["num_ranks"])]
    return [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]


if __name__ == "__main__":
    print("exit codes:", json.dumps([run(job) for job in json.loads(Path(sys.argv[1]).read_text())]))
