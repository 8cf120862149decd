"""What a feature of a run promises beside any other, and checks of it in the metrics of two steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

LR: Final = 5e-4
"""The quickstart's."""
Rows = Sequence[Mapping[str, float]]
Same = Literal["numbers", "steps", "rollout"]
SAME: Final[dict[Same, str]] = {
    "numbers": "both steps are those of the other feature alone",
    "steps": "both steps are those of the other feature alone, to 1e-4",
    "rollout": "the first completions and rewards are those of the other feature alone",
}
"""How much of a run a feature leaves as it is without it."""


@dataclass(frozen=True)
class Feature:
    """What a run of two steps, of four prompts with four completions each, gets beside what it has."""

    keys: str
    """For the table, in Markdown"""
    arguments: Sequence[str]
    promises: str = ""
    """What ``holds`` checks, for the table"""
    holds: Callable[[Rows, Path], bool] = lambda rows, run: True
    """Whether the two rows of metrics and the run's folder are as they should be."""
    same: Same | None = None
    resumes: bool = False
    """Whether the second step is taken again, from the checkpoint of the first."""
    killed_as: str | None = None
    """Where the second step kills the process, which is then resumed: the feature that stands for the run unkilled."""
    of: Sequence[str] = ()
    """Keys of which it is a value; no run has two of one"""
    num_ranks: int | None = None
    after: str | None = None
    """Feature whose run alone writes what the arguments name"""

    @property
    def promise(self) -> str:
        return "; ".join(filter(None, [self.promises, SAME[self.same] if self.same else ""]))


def each(*names: str) -> Callable[[Rows, Path], bool]:
    """Return a check that each step has the metrics."""
    return lambda rows, run: all(name in row for name in names for row in rows)


def trained(rows: Rows) -> Rows:
    """Return the rows of steps that train the policy."""
    return [row for row in rows if "policy/lr" in row]


def as_engine(rows: Rows, run: Path) -> bool:
    """Return whether the trainer's logprobs are the engine's, wherever a step has tokens of the newest policy."""
    return "mismatch/mean" in rows[0] and all(row.get("mismatch/mean", 0.0) < 1e-4 for row in rows)


def schedule(rows: Rows, run: Path) -> bool:
    """Return whether the rate of each step that trains the policy is the schedule's next one."""
    return all(abs(row["policy/lr"] - LR * (0.5 + 0.125 * step)) < 1e-9 for step, row in enumerate(trained(rows)))


def from_first_policy(rows: Rows, run: Path) -> bool:
    """Return whether the divergence is that of the policy's own updates: none before the first, some after it."""
    first, second = (row.get("policy/kl", 0.0) for row in rows)
    return abs(first) < 1e-6 + 2 * rows[0].get("policy/approx_kl", 0.0) and (second > 0 or len(trained(rows)) < 2)


def ended_early(rows: Rows, run: Path) -> bool:
    """Return whether the run says that it ended after the second step of nine, and kept it."""
    message = json.loads((run / "run.json").read_text())["message"]
    return (run / "checkpoints" / "step-00000002").is_dir() and message.startswith("ended after step 2 of 9")


def stopped(rows: Rows, run: Path) -> bool:
    """Return whether texts end at a stop string; the game's have a turn's answer after it."""
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    texts = [each["completion"] for each in samples if each["num_turns"] == 1]
    goes_on = [text for text in texts if set(text[:-1]) & {"3", "7"}]
    return not goes_on and (any(text.endswith(("3", "7")) for text in texts) or "turns/mean" in rows[0])


def weighted(rows: Rows, run: Path) -> bool:
    """Return whether the reward is the weighted sum of both, and what the environment gave, if there is one."""
    for row in rows:
        expected = 0.75 * row["reward/first"] + 0.25 * row["reward/second"] + row.get("reward/environment", 0.0)
        if abs(row["reward/mean"] - expected) >= 1e-6:
            return False
    return True
