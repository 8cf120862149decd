"""Runs command lines as a user would, in real processes that share one start-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

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
    """One command line; see ``forked_runs.py`` for ``extra``."""

    arguments: list[str]
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """How a command line ended."""

    exit_code: Any
    """One, or of ``forked_ranks.py`` a list"""
    output: str
    """stdout and stderr"""

    @property
    def message(self) -> str:
        """The output on one line: terminals wrap it anywhere."""
        return " ".join(self.output.split())


def run_jobs(
    jobs: dict[str, Job], folder: Path, timeout: float = 840, script: str = "forked_runs.py"
) -> dict[str, Result]:
    """Run the jobs one after another from the repository's root."""
    outputs = {name: folder / f"{name}.log" for name in jobs}
    described = [{"arguments": job.arguments, "output": str(outputs[name]), **job.extra} for name, job in jobs.items()]
    (folder / "jobs.json").write_text(json.dumps(described))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), str(folder / "jobs.json")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the model is tiny
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    codes: list[Any] = json.loads(done.stdout.rpartition("exit codes:")[2])
    return {name: Result(code, outputs[name].read_text()) for name, code in zip(jobs, codes, strict=True)}
