"""Runs command lines as a user would, in real processes that the fork server starts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedProcess, free_port, torchrun_variables

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("one_run.py")

SMALL = [
    *("fit", "--config", "configs/quickstart.yaml"),
    *("--model.policy.path", "tests/model"),
    *("--model.batch.prompts_per_step", "4", "--model.batch.group_size", "4", "--run.report", "false"),
    *("--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"),
]
"""The quickstart with 16 completions a step and nothing beside training.

Its model is the one in ``tests/model``, whose padding token is no end token: more completions earn something.
"""


@dataclass
class Job:
    """One command line."""

    arguments: list[str]
    extra: dict[str, Any] = field(default_factory=dict)
    """What happens to the process; see ``one_run.py``."""
    num_ranks: int | None = None
    """Processes that are started as torchrun does, instead of a single one without its variables."""
    after: str | None = None
    """The job that must have run before this one, which goes on from it."""
    copy: tuple[Path, Path] | None = None
    """A folder that is copied before the job begins, from and to."""


@dataclass
class Result:
    """How a command line ended."""

    exit_code: Any
    """One, or a list where ``num_ranks`` is given"""
    output: str
    """stdout and stderr, of rank 0"""

    @property
    def message(self) -> str:
        """The output on one line: terminals wrap it anywhere."""
        return " ".join(self.output.split())


class Runs(Mapping[str, Result]):
    """Results by name; a job runs when its result is first asked for, from the repository's root."""

    def __init__(self, jobs: dict[str, Job], folder: Path, timeout: float = 840) -> None:
        self.jobs = jobs
        self.folder = folder
        self.timeout = timeout
        self._results: dict[str, Result] = {}

    def __getitem__(self, name: str) -> Result:
        if name not in self._results:
            job = self.jobs[name]
            if job.after is not None:
                self[job.after]
            self._results[name] = run_job(job, self.folder / f"{name}.log", self.timeout)
        return self._results[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    def ended(self, name: str, exit_code: Any = 0) -> Result:
        """Return a result, after a check of its exit code."""
        result = self[name]
        assert result.exit_code == exit_code, f"{name}: {result.output[-3000:]}"
        return result


def samples(values: Iterable[Any], *on_every_push: Any) -> list[Any]:
    """Return parameters of a test of which a few run on every push, and the others with ``make test-all``."""
    values = list(values)
    assert set(on_every_push) <= set(values), on_every_push
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=marks)
        for value in values
        for marks in [() if value in on_every_push else pytest.mark.nightly]
    ]


def run_job(job: Job, log: Path, timeout: float = 840) -> Result:
    """Run one command line; the output of further ranks goes beside that of the first."""
    if job.copy is not None:
        shutil.copytree(*job.copy)
    variables: list[dict[str, str]] = [{}]
    if job.num_ranks is not None:
        port = free_port()
        variables = [torchrun_variables(rank, job.num_ranks, port) for rank in range(job.num_ranks)]
    command = [sys.executable, SCRIPT, json.dumps(job.extra), *job.arguments]
    processes = [
        ForkedProcess(command, env=os.environ | ranks, cwd=ROOT, output=log if rank == 0 else f"{log}.{rank}")
        for rank, ranks in enumerate(variables)
    ]
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Result(codes[0] if job.num_ranks is None else codes, log.read_text())
