r"""Kills one rank of a run in its third step, and resumes the run on fewer GPUs.

    python benchmarks/rank_kill.py --workload fixed --rank 2 --resume-on 2 --out OUT
    python benchmarks/rank_kill.py --workload tiny --rank 2 --resume-on 2 --out OUT -- \
        --model.rollout HFRollout --trainer.devices 4

Needs what ``step_rlplug.py`` needs; the second line tries it on a CPU. The rank gets SIGKILL a second after the second
step, of which there is a checkpoint. What is printed: seconds until all processes of the run have ended, what they
said, GiB that are still taken of each GPU, and how the run went on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from step_work import NAME, WORKLOADS

HERE = Path(__file__).parent
MARK = "RLPLUG_RANK_KILL"
"""Environment variable by which processes of the run are found."""
KILLED_IN = 3
START_S, END_S = 400.0, 120.0
"""Longest waits: for the second step, and for the end of all processes."""


class Run:
    """Processes of one run, one command after another."""

    def __init__(self, work: Path, out: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.runs = work / "runs"
        self._log = out / "rank-kill.log"
        os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"

    def start(self, arguments: list[str], name: str, gpus: int | None = None) -> subprocess.Popen[str]:
        environment = os.environ | {MARK: self.mark, NAME: name}
        if gpus is not None and torch.cuda.is_available():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus)))
        with self._log.open("a") as log:
            command = [sys.executable, str(HERE / "step_rlplug.py"), *arguments]
            return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)

    def processes(self) -> Iterator[psutil.Process]:
        """Yield the processes that run."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank but the first, which started the others."""
        return min(
            (each for each in self.processes() if each.environ().get("LOCAL_RANK") == str(number)),
            key=lambda process: process.create_time(),
        )

    def said(self) -> str:
        return self._log.read_text()


def wait_until_training(run: Run, process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until the step in which a rank is killed runs."""
    began = time.monotonic()
    while True:
        rows, saved = folder / "metrics.jsonl", folder / "checkpoints" / f"step-{KILLED_IN - 1:08d}"
        if saved.exists() and len(rows.read_text().splitlines()) >= KILLED_IN - 1:
            return
        if process.poll() is not None or time.monotonic() - began > START_S:
            sys.exit(f"the run did not come to step {KILLED_IN}:\n{run.said()[-3000:]}")
        time.sleep(0.05)


def gib_taken() -> list[float]:
    """Return the GiB of each GPU that are taken by anything, this process included."""
    taken = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        taken.append(round((total - free) / 2**30, 2))
    return taken


def kill(run: Run, options: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Start the run, kill the rank, and return what followed, with the run's folder."""
    before = {path.name for path in run.runs.glob("[0-9]*")}
    extra = ["--checkpoint.every_n_steps", str(KILLED_IN - 1), *options.rlplug]
    process = run.start([options.workload, str(options.work), str(KILLED_IN + 1), *extra], options.workload)
    while not (new := [path for path in run.runs.glob("[0-9]*") if path.name not in before]):
        if process.poll() is not None:
            sys.exit(f"the run did not start:\n{run.said()[-3000:]}")
        time.sleep(0.2)
    wait_until_training(run, process, new[0])
    time.sleep(1)
    run.rank(options.rank).send_signal(signal.SIGKILL)
    killed, ended = time.monotonic(), {}
    while (left := [each.pid for each in run.processes()]) and time.monotonic() - killed < END_S:
        if process.poll() is not None:
            ended.setdefault("rank 0 ended after s", round(time.monotonic() - killed, 1))
        time.sleep(0.1)
    found = {
        "all ended after s": round(time.monotonic() - killed, 1),
        **ended,
        "still there": left,
        "status of rank 0": process.poll(),
        "said": [line for line in run.said().splitlines() if line.startswith("rlplug: ")],
        "GiB taken": gib_taken(),
    }
    for each in run.processes():
        each.kill()
    return found, new[0]


def resume(run: Run, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Go on with the run on fewer GPUs until its last step, and return what it printed."""
    began = time.monotonic()
    arguments = ["fit", "--resume", str(folder), "--trainer.devices", str(options.resume_on)]
    printed, _ = run.start(arguments, options.workload, options.resume_on).communicate(timeout=START_S)
    steps = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    return {"ranks": options.resume_on, "ended after s": round(time.monotonic() - began, 1), "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="fixed")
    parser.add_argument("--rank", type=int, default=2, help="which is killed; not 0")
    parser.add_argument("--resume-on", type=int, default=2, help="GPUs of the run that goes on")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rlplug-rank-kill")
    parser.add_argument("--out", type=Path, required=True, help="folder for rank-kill.json and the log")
    parser.add_argument("rlplug", nargs="*", help="after --: options of rlplug fit")
    options = parser.parse_args()
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    run = Run(options.work, options.out)
    found: dict[str, Any] = {}
    try:
        found["killed"], folder = kill(run, options)
        print(json.dumps(found), flush=True)
        found["resumed"] = resume(run, folder, options)
        print(json.dumps(found["resumed"]), flush=True)
    finally:
        (options.out / "rank-kill.json").write_text(json.dumps(found, indent=1) + "\n")
        for each in run.processes():
            each.kill()


if __name__ == "__main__":
    main()
