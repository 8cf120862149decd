"""Processes of ``rlplug check``: pytest over the generated tests, each with a part of the subjects."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import torch

from rlplug.observability.terminal import say
from rlplug_devkit.check import generated
from rlplug_devkit.check.results import RESULTS, SHARE, Result, read_results
from rlplug_devkit.check.subjects import Subject, class_name
from rlplug_devkit.claims import STARTS_ONCE, words_of

OPTIONS: Final = ("-q", "-p", "no:cacheprovider", "-p", "rlplug_devkit.check.results", "-o", "addopts=")
LINE_S: Final = 30.0
"""Time between two lines of progress in seconds."""
SLOW: Final = ("engine", "trainer", "optimization")
"""Kinds whose subjects come first, so that no process begins one when the others have ended."""


def visible_gpus() -> list[str]:
    """Return the GPUs of this process as ``CUDA_VISIBLE_DEVICES`` has them; none on a CPU."""
    count = torch.cuda.device_count()
    named = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return named[:count] or [str(number) for number in range(count)]


def run_kits(
    subjects: Sequence[Subject], tests: Sequence[Path], folder: Path, jobs: int | None, limit_s: float
) -> list[Result]:
    """Run the kits of subjects, and an author's test files, in several processes; return a result for each check.

    On several GPUs each process has one of its own, and the checks of an engine are dealt out to all of them.

    Args:
        subjects: What to check; none has a problem.
        tests: Files of tests, which the first process runs too.
        folder: An empty folder, for what processes print and find.
        jobs: Number of processes; by default one for each GPU, whose memory kits measure, and 2 on a CPU.
        limit_s: Longest time for all in seconds; what has not ended then has failed.
    """
    gpus = visible_gpus()
    jobs = max(jobs or len(gpus) or 2, 1)
    deadline = time.monotonic() + limit_s
    has_own = 1 < jobs <= len(gpus)
    dealt = [subject for subject in subjects if subject.kind == "engine" and has_own]
    whole = sorted((each for each in subjects if each not in dealt), key=lambda each: each.kind not in SLOW)
    with ThreadPoolExecutor(jobs) as pool:
        futures = []
        for number in range(jobs):
            part, own = [*dealt, *whole[number::jobs]], tests if number == 0 else ()
            variables = {SHARE: f"{number} {jobs}", "CUDA_VISIBLE_DEVICES": gpus[number]} if has_own else {}
            if part or own:
                futures.append(pool.submit(_run_part, part, own, folder / str(number), deadline, variables))
        while wait(futures, timeout=LINE_S).not_done:
            say(_progress(folder), wraps=True)
        return [result for future in futures for result in future.result()]


def _progress(folder: Path) -> str:
    """Return in words what the processes that write below a folder have done, and what they do."""
    begun: list[str] = []
    num_done = 0
    for file in sorted(folder.glob("*/*/results.jsonl")):
        with contextlib.suppress(ValueError):  # its last line is not whole yet
            found, last = read_results(file.read_text().splitlines())
            num_done += len(found)
            begun += [] if last is None else [f"{words_of(last.check)} ({last.subject.removeprefix('Test')})"]
    return f"{num_done} checks done; now {', '.join(begun) or 'starting'}"


def _run_part(
    subjects: Sequence[Subject], tests: Sequence[Path], folder: Path, deadline: float, variables: Mapping[str, str]
) -> list[Result]:
    """Run subjects in a process, those after one that ended it in another, and what one engine could not run alone."""
    results: list[Result] = []
    every = {class_name(subject): subject for subject in subjects}
    for number in range(len(subjects) + 1):
        found, begun, ending = _run(subjects, tests, folder / str(number), deadline, variables)
        results += found
        if not ending:
            break
        subject, check = ("", "start") if begun is None else (begun.subject, begun.check)
        results.append(Result(subject, check, "failed", 0.0, ending))
        reached = {result.subject for result in results}
        subjects, tests = [each for each in subjects if class_name(each) not in reached], ()
        if begun is None or not subjects:
            break
    others = [result for result in results if result.subject not in every]
    again = (run_again(subject, results, folder, deadline, variables) for subject in every.values())
    return [*others, *itertools.chain.from_iterable(again)]


def run_again(
    subject: Subject, results: Sequence[Result], folder: Path, deadline: float, variables: Mapping[str, str]
) -> list[Result]:
    """Return a subject's results, those that wanted a second engine from further processes: each has one engine."""
    own = {result.check: result for result in results if result.subject == class_name(subject)}
    for number in range(len(own)):
        left = [check for check, result in own.items() if result.held == "skipped" and STARTS_ONCE in result.reason]
        if not left:
            break
        place = folder / f"{class_name(subject)}-{number}"
        found, begun, ending = _run([subject], (), place, deadline, variables, left)
        own |= {result.check: result for result in found}
        if ending and begun is not None:
            own[begun.check] = Result(begun.subject, begun.check, "failed", 0.0, ending)
        elif ending or not found:
            break
    return list(own.values())


def _run(
    subjects: Sequence[Subject],
    tests: Sequence[Path],
    folder: Path,
    deadline: float,
    variables: Mapping[str, str],
    checks: Sequence[str] = (),
) -> tuple[list[Result], Result | None, str]:
    """Run pytest over the generated tests of subjects, or over some checks of one.

    Returns:
        Results, the check that has begun and not ended, and how the process ended where it did not come to its end.
    """
    (folder / "working").mkdir(parents=True)
    job = folder / "job.pkl"
    job.write_bytes(pickle.dumps(tuple(subjects)))
    variables = {
        **(variables if not checks else {name: each for name, each in variables.items() if name != SHARE}),
        generated.JOB: str(job),
        RESULTS: str(folder / "results.jsonl"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--rootdir", str(folder), "-c", os.devnull]
    collected = folder / "working" / "test_package.py"  # not beside the kits, whose folder may have a conftest.py above
    collected.write_text(f"from {generated.__name__} import *\n")
    of_checks = [f"{collected}::{class_name(subjects[0])}::{check}" for check in checks]
    command += [f"--basetemp={folder / 'tmp'}", *(of_checks or [str(collected)]), *map(str, tests)]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder / "working", env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        status = process.wait(max(deadline - time.monotonic(), 0))
        ending = "" if status in (0, 1) else f"the process of the checks ended with status {status}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        ending = "the time of --limit is over"
    file = folder / "results.jsonl"
    found, begun = read_results(file.read_text().splitlines() if file.exists() else [])
    if ending:
        ending += ": " + " ".join((folder / "output.txt").read_text(errors="replace")[-600:].split())
    return found, begun, ending
