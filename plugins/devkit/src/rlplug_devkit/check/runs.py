"""Processes of ``rlplug check``: pytest over the generated tests, each with a part of the subjects."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlplug_devkit.check import generated
from rlplug_devkit.check.results import RESULTS, Result, read_results
from rlplug_devkit.check.subjects import Subject

OPTIONS: Final = ("-q", "-p", "no:cacheprovider", "-p", "rlplug_devkit.check.results", "-o", "addopts=")
SLOW: Final = ("engine", "trainer", "optimization")
"""Kinds whose subjects come first, so that no process begins one when the others have ended."""


def run_kits(
    subjects: Sequence[Subject], tests: Sequence[Path], folder: Path, jobs: int, limit_s: float
) -> list[Result]:
    """Run the kits of subjects, and an author's test files, in ``jobs`` processes; return a result for each check.

    Args:
        subjects: What to check; none has a problem.
        tests: Files of tests, which the first process runs too.
        folder: An empty folder, for what processes print and find.
        jobs: Number of processes.
        limit_s: Longest time for all in seconds; what has not ended then has failed.
    """
    ordered = sorted(subjects, key=lambda subject: subject.kind not in SLOW)
    parts = [ordered[first::jobs] for first in range(jobs)]
    started = [
        _start(part, tests if number == 0 else (), folder / str(number))
        for number, part in enumerate(parts)
        if part or (tests and number == 0)
    ]
    deadline = time.monotonic() + limit_s
    results: list[Result] = []
    for process, own in started:
        try:
            status = process.wait(max(deadline - time.monotonic(), 0))
            ending = "" if status in (0, 1) else f"the process of the checks ended with status {status}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ending = f"not finished within {limit_s:.0f} s"
        lines = (own / "results.jsonl").read_text().splitlines() if (own / "results.jsonl").exists() else []
        found, open_check = read_results(lines)
        results += found
        if ending:
            tail = (own / "output.txt").read_text(errors="replace")[-600:]
            results.append(Result("", open_check or "start", "failed", 0.0, f"{ending}: {' '.join(tail.split())}"))
    return results


def _start(subjects: Sequence[Subject], tests: Sequence[Path], folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    (folder / "working").mkdir(parents=True)
    job = folder / "job.pkl"
    job.write_bytes(pickle.dumps(tuple(subjects)))
    variables = {
        generated.JOB: str(job),
        RESULTS: str(folder / "results.jsonl"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--rootdir", str(folder), "-c", os.devnull]
    command += [f"--basetemp={folder / 'tmp'}", str(generated.__file__), *map(str, tests)]
    output = (folder / "output.txt").open("wb")
    with output:
        process = subprocess.Popen(
            command, cwd=folder / "working", env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
        )
    return process, folder
