"""Which groups trained in which step: written by each partial rollout, and followed by one that repeats it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rlplug.errors import ConfigError, RunError, brief
from rlplug.rollout.config import GROUPS

KEY: Final = "model.partial_rollout.replay"
NAMES: Final[Mapping[str, str]] = {
    "seed": "the seed",
    "data": "the training prompts or their order (data.train, data.seed, data.shuffle)",
    "prompts_per_step": "model.batch.prompts_per_step",
    "group_size": "model.batch.group_size",
    "max_open": "the groups in flight",
    "max_staleness": "model.partial_rollout.max_staleness",
}
"""What a line says of its run, and how a message names it."""


def fingerprint(data: Mapping[str, Any]) -> str:
    """Return a short hash of what a stream of prompts says of its prompts and their order."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class GroupSchedule:
    """The groups that trained in the steps of a run, and those that must, where a previous run is repeated.

    Args:
        run: What identifies data, seed and limits, by the names of ``NAMES``.
        wanted: For each step, from 1, the numbers of the groups that each of its takes must return; empty for a run
            that repeats none.
    """

    run: Mapping[str, Any]
    wanted: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    step: int = 0
    taken: list[list[int]] = field(default_factory=list)
    """Numbers of the groups that each take of the step returned."""

    def begin(self, step: int) -> None:
        """Begin a step, unless it has begun."""
        if step != self.step:
            self.step, self.taken = step, []

    def discard(self) -> None:
        """Forget the step that has begun."""
        self.step, self.taken = 0, []

    def next_groups(self) -> list[int] | None:
        """Return the numbers of the groups that must train next; ``None`` where no run is repeated.

        Raises:
            RunError: The step takes groups more often than in the run that is repeated.
        """
        if not self.wanted:
            return None
        takes = self.wanted[self.step]
        if len(self.taken) == len(takes):
            raise RunError(
                f"step {self.step} wants groups {len(takes) + 1} times, and {len(takes)} times in the run of {KEY}: "
                "the algorithm rejected other groups than there. Remove the key to go on without it."
            )
        return list(takes[len(self.taken)])

    def line(self, timeline: Mapping[str, Any] | None = None) -> str:
        """Return the step's line of ``groups.jsonl``, with what trainer and engine did when, where that is given."""
        more = {} if timeline is None else {"timeline": timeline}
        return json.dumps({"step": self.step, "groups": self.taken, **self.run, **more}) + "\n"


def read_schedule(path: Path, run: Mapping[str, Any], num_steps: int) -> GroupSchedule:
    """Return the schedule of a run that repeats the one whose ``groups.jsonl`` is at ``path``.

    Args:
        path: The file.
        run: What identifies the run that repeats it.
        num_steps: Steps that the file must have, from 1.

    Raises:
        ConfigError: There is no such file, a line is torn or no step's, a step is missing or there twice, or the file
            is of a run with other data, seed or limits.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{KEY} is {str(path)!r}, which cannot be read ({error}): give the {GROUPS} of a run."
        ) from None
    wanted: dict[int, list[list[int]]] = {}
    for number, line in enumerate(lines, start=1):
        step, groups, found = _record(line, f"{KEY}: line {number} of {path}")
        for name, value in run.items():
            if found.get(name) != value:
                raise ConfigError(
                    f"{KEY}: {path} is of a run with other values of {NAMES[name]}: it has {found.get(name)!r:.80}, "
                    f"and this run {value!r}. Repeat a run with its own configuration and data."
                )
        if step in wanted:
            raise ConfigError(f"{KEY}: {path} has step {step} twice: give the file of one run.")
        wanted[step] = groups
    if missing := sorted(set(range(1, num_steps + 1)) - wanted.keys()):
        raise ConfigError(
            f"{KEY}: {path} lacks step {missing[0]}"
            + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + ": set "
            "model.num_steps to what it has, or give another file."
        )
    return GroupSchedule(run, wanted)


def _record(line: str, where: str) -> tuple[int, list[list[int]], dict[str, Any]]:
    try:
        found: Any = json.loads(line) if line.endswith("\n") else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is torn: {brief(line)}.")
    step: Any = found.get("step")
    groups: Any = found.get("groups")
    is_step = type(step) is int and isinstance(groups, list) and all(isinstance(take, list) for take in groups)
    if not is_step or not all(type(group) is int for take in groups for group in take):
        raise ConfigError(f"{where} is not a step and its groups: {brief(line)}.")
    return step, groups, found
