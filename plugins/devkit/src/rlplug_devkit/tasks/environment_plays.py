"""Checks of an environment on drawn trajectories: any turns, in any order, closed anywhere."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlplug.types import Prompt
from rlplug_devkit.other_process import of_children
from rlplug_devkit.tasks.calls import HOSTILE
from rlplug_devkit.tasks.playing import SEED, Played
from rlplug_devkit.tasks.policy_texts import PolicyTextChecks

NUM_PLAYS: Final = 24
"""Trajectories, of few tasks, seeds and turns: many agree with another one until some turn."""
MOST_TURNS: Final = 8
NUM_LONG: Final = 40
"""Turns of a trajectory that says one thing, until a task ends that has a limit of its own."""
PLAY_S: Final = 10.0
"""About how long a process may play drawn trajectories, in seconds."""
NUM_BESIDE: Final = 4
"""Trajectories that are played in turn."""
DONE: Final = 2
"""Place in what an answer has told, behind its text and reward."""
SEEDS: Final = (SEED, 0, 1, 2)


@dataclass(frozen=True)
class Script:
    """What a drawn trajectory begins with, and what the policy says."""

    prompt: Prompt
    seed: int
    turns: Sequence[str]


class EnvironmentPlayChecks(PolicyTextChecks):
    """Checks that compare an environment with itself on trajectories that no author has written down."""

    num_plays = NUM_PLAYS
    """Fewer where trajectories are slow; the other process is told."""

    def test_drawn_trajectories_are_answered_as_by_another_process(self) -> None:
        """Of each in a process of its own, in which nothing was played before."""
        self._needs_repetition()
        began = time.monotonic()
        self._compared(self._play(self.prompts()[0], self.turns()))
        self.num_plays = max(NUM_BESIDE, min(NUM_PLAYS, int(PLAY_S / (time.monotonic() - began))))
        scripts = self._drawn()
        here, there = self._drawn_answers(), self._elsewhere("_drawn_answers_one_by_one", is_fresh=True)
        for script, found, expected in zip(scripts, here, there, strict=True):
            assert found == expected, (
                f"the prompt {script.prompt.text[:60]!r}, the seed {script.seed} and the turns {_brief(script.turns)} "
                f"were answered {found} beside others, and {expected} alone in another process: answers follow from "
                "prompt, seed and turns. Keep a trajectory's state in self, in nothing that objects share, and in no "
                "list or dictionary that step returns."
            )

    def test_metrics_of_ends_are_shares(self) -> None:
        """A metric is a mean over the answers that have it: one that is 1, or is left out, is always 1."""
        self._skip_after_failure()
        drawn, began = self._drawn_answers(), time.monotonic()
        for turn in self.turns():  # a task may end where the policy goes on for too long
            if time.monotonic() - began < PLAY_S:
                drawn += self._alone(Script(self.prompts()[0], SEED, [turn] * NUM_LONG))
        ends = [answers[-1] for answers in drawn if answers and answers[-1][DONE]]
        for name in sorted({name for *_, metrics in ends for name in metrics}):
            values = [metrics[name] for *_, metrics in ends if name in metrics]
            assert {*values} != {1.0} or len(values) == len(ends), (
                f"of {len(ends)} trajectories that ended, {len(values)} have the metric {name!r}, which is 1 in each: "
                "a run logs the mean over those that have it, which is always 1. Give 0 in the others."
            )

    def _drawn_answers(self) -> list[Any]:
        """Return what drawn trajectories are answered, some of which are played in turn."""
        scripts, draw = self._drawn(), random.Random(1)
        self._clears = True
        found: list[Any] = []
        with self._guard().around("trajectories in turn"):
            for start in range(0, len(scripts), NUM_BESIDE):
                found += self._beside(scripts[start : start + NUM_BESIDE], draw)
        return found

    def _drawn_answers_one_by_one(self) -> list[Any]:
        """Return what the drawn trajectories are answered, each in a process of its own."""
        scripts = of_children([self._drawn])[0]
        return [each for (each,) in of_children([functools.partial(self._alone, script) for script in scripts])]

    def _alone(self, script: Script) -> list[Any]:
        return self._beside([script], random.Random(1))

    def _beside(self, scripts: Sequence[Script], draw: random.Random) -> list[Any]:
        """Play trajectories whose turns come in a drawn order, and return what each was answered and measured."""
        environments = [self.make_environment() for _ in scripts]
        played: list[Played] = []
        for script, environment in zip(scripts, environments, strict=True):
            self._seed = script.seed
            played.append(Played(error=self._reset(environment, script.prompt)))
        order = [place for place, script in enumerate(scripts) for _ in script.turns]
        draw.shuffle(order)
        said = [iter(script.turns) for script in scripts]
        for place in order:
            former, turn = played[place], next(said[place])
            if not former.problem and not (former.answers and former.answers[-1].done):
                answer, error, malformed = self._step(environments[place], turn)
                played[place] = Played((*former.answers, *([answer] if answer else [])), error, malformed)
        for script, environment, each in zip(scripts, environments, played, strict=True):
            problem = each.problem or self._close(environment)
            if problem:
                self._not_compared(f"on {script.prompt.text[:60]!r} and the turns {_brief(script.turns)}, {problem}")
        return [
            [(*told, _counts(a.metrics)) for told, a in zip(each.told, each.answers, strict=True)] for each in played
        ]

    def _drawn(self) -> list[Script]:
        """Return trajectories, the same each time."""
        draw, prompts, own = random.Random(0), self.prompts(), list(self.turns())
        answers = [str(prompt.answer)[:1000] for prompt in prompts if prompt.answer is not None]
        others = [*answers, *(text for text in HOSTILE.values() if len(text) < 100)]
        scripts = []
        for _ in range(self.num_plays):
            turns = [_said(draw, draw.choice(own if draw.random() < 0.7 else others)) for _ in range(MOST_TURNS)]
            scripts.append(Script(draw.choice(prompts), draw.choice(SEEDS), turns[: draw.randint(1, MOST_TURNS)]))
        return scripts


def _said(draw: random.Random, turn: str) -> str:
    """Return a turn, mostly as it is, or as a policy may vary it."""
    return draw.choice([turn] * 5 + [turn.swapcase(), f"{turn}\n", f" {turn}", turn * 2, turn[: len(turn) // 2]])


def _counts(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics by name, without the numbers that are no counts: times differ each time."""
    return {name: value if float(value).is_integer() else None for name, value in metrics.items()}


def _brief(turns: Sequence[str]) -> list[str]:
    return [turn[:40] for turn in turns]
