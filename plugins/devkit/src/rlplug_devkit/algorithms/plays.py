"""Checks of an algorithm on drawn steps: any rewards, lengths and distances, resumed and split anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlplug.errors import ConfigError, describe
from rlplug.interfaces.algorithm import Algorithm, RunInfo
from rlplug.types import StepBatch, groups_of
from rlplug_devkit.algorithms.checks import AlgorithmChecks
from rlplug_devkit.algorithms.passes import Learned, Step, difference, learn, step_of
from rlplug_devkit.algorithms.steps import NUM_GROUPS, Row, batch_of, make_row
from rlplug_devkit.algorithms.training import metrics_of_step, numbers_of
from rlplug_devkit.tasks.scoring import with_failed

NUM_STEPS: Final = 12
OFFSETS: Final = (0.0, 0.0, 3.0, -1.0, 1e4)
SCALES: Final = (1.0, 1.0, 0.0, 1e-3, 100.0)
"""What drawn rewards of a group are multiplied by, and what is added to them."""
NOISES: Final = (0.0, 0.2, 0.2, 2.0)
"""Distances, in nats, by which the policy has moved."""
FAILS: Final = 0.15
"""Share of completions whose reward failed."""


@dataclass(frozen=True)
class Taken:
    """What an algorithm made of a step."""

    chosen: list[int]
    """Numbers of the rows that it selected."""
    numbers: dict[str, Any]
    """What it said of them."""
    learned: Learned


class PlayChecks(AlgorithmChecks):
    """Checks that compare an algorithm with itself in steps that no author has written down."""

    def test_drawn_steps_are_resumed_and_split(self) -> None:
        """One run goes on; one is resumed after every step, with other numbers where a reward failed, and splits."""
        self._skip_after_failure()
        went_on, state = self._ready(), copy.deepcopy(self._ready().state_dict())
        for number in range(NUM_STEPS):
            rows = drawn_rows(number, self.run)
            expected = self._taken(went_on, number, rows)
            resumed = self._ready()
            resumed.load_state_dict(state)
            found = self._taken(resumed, number, _with_other_failures(rows), splits=True)
            differs = "it selects other samples" if found.chosen != expected.chosen else ""
            differs = differs or self._numbers_differ(found.numbers, expected.numbers)
            differs = differs or difference(found.learned, expected.learned, self.tolerance)
            assert not differs, (
                f"in step {number + 1} of drawn completions, {differs} in a run that is resumed after every step, "
                "splits it into other micro-batches, and has other numbers where rewards failed: what a step leaves "
                "behind belongs into state_dict, and a failed reward's number means nothing."
            )
            state = copy.deepcopy(resumed.state_dict())

    def _taken(self, algorithm: Algorithm, number: int, rows: Sequence[Row], splits: bool = False) -> Taken:
        """Take a step as a run does; fail where something is not finite, or changes what it was given."""
        try:
            return self._step_taken(algorithm, number, rows, splits)
        except ConfigError as error:
            pytest.skip(f"does not apply: drawn completions are refused: {error}")
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            return self._not_compared(f"in step {number + 1} of drawn completions it raised {describe(error)}")

    def _step_taken(self, algorithm: Algorithm, number: int, rows: Sequence[Row], splits: bool) -> Taken:
        places = {id(row.sample): place for place, row in enumerate(rows)}
        groups = groups_of([row.sample for row in rows])
        chosen = sorted(places[id(sample)] for group in groups for sample in algorithm.select(list(group)))
        kept = [rows[place] for place in chosen]
        batch = batch_of(kept, algorithm.needs)
        result = self._unchanged(batch, lambda: algorithm.advantages(batch))
        step = step_of(algorithm, kept, result)
        learned = self._unchanged(step.batch, lambda: _learned(step, number if splits else None))
        parts = [learned.loss, *learned.gradients.values()]
        assert all(bool(each.isfinite().all()) for each in parts), (
            f"in step {number + 1} of drawn completions, whose rewards are {[row.sample.reward for row in kept]}, a "
            "loss or a gradient is not finite: a variance that is rounded may be below 0, and 0 divides nothing."
        )
        numbers = numbers_of(result, batch)
        rewards = [row.sample.reward for row in kept if not row.sample.errors]
        mean = {"reward/mean": float(np.mean(rewards))} if rewards else {}
        algorithm.after_step(metrics_of_step(number, result, learned) | mean)
        return Taken(chosen, numbers, learned)

    def _unchanged(self, batch: StepBatch, call: Callable[[], Any]) -> Any:
        """Return what a call returns; fail where it changes its batch."""
        fields = {**batch.per_sequence, **batch.per_token, **batch.tokens.tensors()}
        before = {name: torch.as_tensor(value).clone() for name, value in fields.items()}
        returned = call()
        changed = [
            n for n, v in fields.items() if not torch.equal(torch.as_tensor(v).nan_to_num(), before[n].nan_to_num())
        ]
        assert not changed, f"advantages or a loss changes {changed} of its batch: later passes and the log read it."
        return returned

    def _numbers_differ(self, found: dict[str, Any], expected: dict[str, Any]) -> str:
        """Return in words how what was said of a step differs; empty where it does not."""
        if found.keys() != expected.keys():
            return f"advantages have the parts {sorted(found)} and {sorted(expected)}"
        for name, value in expected.items():
            other = found[name]
            is_same = (
                other == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)
                if name == "metrics"
                else (torch.allclose(other, value, self.tolerance, self.tolerance, equal_nan=True))
            )
            if not is_same:
                return f"{name} are {other}, and {value} in one that goes on,"
        return ""


def drawn_rows(seed: int, run: RunInfo) -> list[Row]:
    """Return the completions of a step, by ascending group, each group with rewards of another size."""
    random = np.random.default_rng(1000 + seed)
    rows: list[Row] = []
    for group in range(NUM_GROUPS):
        is_binary = random.random() < 0.5
        drawn = random.integers(0, 2, run.group_size) if is_binary else random.normal(size=run.group_size)
        rewards: NDArray[Any] = drawn * random.choice(SCALES) + random.choice(OFFSETS)
        for reward in rewards:
            longest = int(random.choice([1, 2, run.max_new_tokens, run.max_new_tokens]))
            is_failed, noise = random.random() < FAILS, float(random.choice(NOISES))
            num_new = int(random.integers(1, longest + 1))
            rows.append(make_row(random, group, num_new, float(reward), is_failed, noise))
    return rows


def _with_other_failures(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with another number as the reward of each sample whose reward failed."""
    samples = with_failed([row.sample for row in rows], 77.0)
    return [replace(row, sample=sample) for row, sample in zip(rows, samples, strict=True)]


def _learned(step: Step, seed: int | None) -> Learned:
    """Return what a step learns: as a whole, or in micro-batches of drawn rows."""
    if seed is None or not step.all_rows:
        return learn(step, step.all_rows)
    random = np.random.default_rng(seed)
    order = random.permutation(step.all_rows)
    parts = [part.tolist() for part in np.array_split(order, int(random.integers(1, 5))) if len(part)]
    learned = learn(step, parts[0])
    for part in parts[1:]:
        learned.add(learn(step, part))
    return learned
