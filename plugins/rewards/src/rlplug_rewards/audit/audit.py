"""Scores attacks and right answers as a run does, and says which attacks pay, and how a reward behaves."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rlplug.interfaces.reward import Reward
from rlplug.rewards.runner import RewardRunner
from rlplug.types import Prompt, RewardError, Sample
from rlplug_rewards.audit.attacks import ATTACKS, FORMS, Write, right, wrong
from rlplug_rewards.audit.search import Search, search

PAYS: Final = 0.5
"""Share of the way from a wrong answer's score to a right one's from which an attack pays."""


@dataclass(frozen=True)
class Scores:
    """Scores of one kind of completion over the prompts; NaN where there is an error."""

    kind: str
    values: list[float]
    seconds: float
    """Time of the calls, in seconds."""
    num_fooled: int = 0
    """Prompts on which it scores like a right answer; for right forms, on which it scores like a wrong one."""
    errors: list[str] = field(default_factory=list)
    """What the reward said, once each."""

    @property
    def highest(self) -> float:
        return max((value for value in self.values if not math.isnan(value)), default=math.nan)


@dataclass(frozen=True)
class Audit:
    """What was found on a reward."""

    reward: str
    num_prompts: int
    num_judged: int
    """Prompts whose right answer scores above a wrong one: on others no attack can be judged."""
    attacks: list[Scores]
    forms: list[Scores]
    problems: list[str]
    """What is wrong with the reward: each fails the audit."""
    notes: list[str]
    """What is worth knowing."""
    search: Search | None = None
    """What a policy found, where one was asked."""

    @property
    def has_failed(self) -> bool:
        return bool(self.problems)


@dataclass(frozen=True)
class Written:
    """What a policy wrote for the prompts."""

    policy: str
    completions: Sequence[Sequence[str]]
    """Completions of each prompt, equally many."""


def audit(
    reward: Reward,
    prompts: Sequence[Prompt],
    deadline_s: float,
    tolerance: float = 0.0,
    written: Written | None = None,
) -> Audit:
    """Attack a reward.

    Args:
        reward: The reward, started.
        prompts: Prompts with their answers.
        deadline_s: Longest time of a call, in seconds, as ``model.limits.reward_deadline_s``.
        tolerance: Largest difference between two scores of the same completion.
        written: What a policy wrote, for a search of the best of them.
    """
    attacked = _Attacked(reward, prompts, deadline_s)
    rights, wrongs = attacked.scores("right", right), attacked.scores("wrong", wrong)
    bounds = {
        prompt.uid: (low, high)
        for prompt, low, high in zip(prompts, wrongs.values, rights.values, strict=True)
        if high > low  # false for NaN
    }
    attacks = [attacked.scores(name, write, bounds) for name, write in ATTACKS.items()]
    forms = [attacked.scores(name, write, bounds, is_right=True) for name, write in FORMS.items()]
    every = [rights, wrongs, *attacks, *forms]
    problems = [
        f"{each.kind} scores like a right answer on {each.num_fooled} of {len(bounds)} prompts"
        for each in attacks
        if each.num_fooled
    ]
    found = None if written is None else _search(attacked, prompts, written, bounds)
    if found is not None and found.num_fooled:
        problems.append(
            f"of {found.num_samples} completions of {found.policy} a wrong one scores like a right answer on "
            f"{found.num_fooled} of {len(bounds)} prompts"
        )
    problems += attacked.problems(every, tolerance)
    notes: list[str] = []
    if not bounds:
        text = "no right answer scores above a wrong one, so that no attack can be judged"
        (problems if reward.needs_answer else notes).append(text)
    elif len(bounds) < len(prompts):
        notes.append(f"on {len(prompts) - len(bounds)} prompts a right answer scores no more than a wrong one")
    lost = [each.kind for each in forms if each.num_fooled]
    if lost:
        notes.append(f"right answers score like wrong ones: {', '.join(lost)}")
    if reward.scales:
        notes.append("values are looked at before they are scaled")
    return Audit(reward.name, len(prompts), len(bounds), [rights, wrongs, *attacks], forms, problems, notes, found)


def _search(
    attacked: _Attacked, prompts: Sequence[Prompt], written: Written, bounds: dict[str, tuple[float, float]]
) -> Search:
    def is_high(prompt: Prompt, value: float) -> bool:
        return prompt.uid in bounds and share_of(value, bounds[prompt.uid]) >= PAYS

    return search(written.policy, prompts, written.completions, attacked.score, is_high)


def share_of(value: float, bounds: tuple[float, float]) -> float:
    """Return how far a score is on the way from a wrong answer's score to a right one's."""
    low, high = bounds
    return (value - low) / (high - low)


class _Attacked:
    """A reward under attack, and how its calls went."""

    def __init__(self, reward: Reward, prompts: Sequence[Prompt], deadline_s: float) -> None:
        self.reward = reward
        self.prompts = prompts
        self.runner = RewardRunner([reward], deadline_s)
        self.by_kind: dict[str, list[str]] = defaultdict(list)
        """What failed, by the kind of the error."""
        self.largest_difference = 0.0

    def scores(
        self,
        kind: str,
        write: Write,
        bounds: dict[str, tuple[float, float]] | None = None,
        is_right: bool = False,
    ) -> Scores:
        """Score one kind of completion twice on every prompt to which it applies."""
        texts = [write(prompt) for prompt in self.prompts]
        before = self.runner.seconds[self.reward.name]
        first, again = self.score(texts), self.score(texts)
        seconds = (self.runner.seconds[self.reward.name] - before) / 2
        errors: dict[str, None] = {}
        values, num_fooled = [], 0
        for prompt, one, two in zip(self.prompts, first, again, strict=True):
            for each in (one, two):
                if isinstance(each, RewardError):
                    errors[each.message] = None
                    self.by_kind[each.kind].append(f"{kind}: {each.message}")
            if isinstance(one, float) and isinstance(two, float):
                self.largest_difference = max(self.largest_difference, abs(one - two))
            values.append(one if isinstance(one, float) else math.nan)
            if bounds and prompt.uid in bounds and isinstance(one, float):
                share = share_of(one, bounds[prompt.uid])
                num_fooled += share < PAYS if is_right else share >= PAYS
        return Scores(kind, values, seconds, num_fooled, list(errors))

    def problems(self, every: Sequence[Scores], tolerance: float) -> list[str]:
        """Return what is wrong with the calls themselves."""
        said = {
            "raised": "score raises",
            "late": "score misses its deadline",
            "invalid": "score returns what cannot train",
        }
        found = [
            f"{text} ({len(self.by_kind[kind])} times), first on {self.by_kind[kind][0]}"
            for kind, text in said.items()
            if self.by_kind[kind]
        ]
        if self.largest_difference > tolerance:
            found.append(f"the same completion scores differently, by up to {self.largest_difference:g}")
        return found

    def score(self, texts: Sequence[str | None]) -> list[float | RewardError | None]:
        """Return the score of each text that is one; a reward that compares a group sees right and wrong beside it."""
        samples: list[Sample] = []
        for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
            if text is None:
                continue
            company = (right(prompt), wrong(prompt)) if self.reward.compares_group else ()
            samples += [sample_of(prompt, number, each) for each in (text, *company) if each is not None]
        found: dict[int, float | RewardError] = {}
        for sample in self.runner.score(samples):
            found.setdefault(sample.group, sample.rewards[self.reward.name])
        return [found.get(number) for number in range(len(texts))]


def sample_of(prompt: Prompt, group: int, text: str) -> Sample:
    """Return a finished sample of one turn, with a token for each character."""
    ids = np.fromiter((ord(each) % 1000 for each in text), np.int32, len(text))
    tokens = np.concatenate([np.asarray(prompt.token_ids, np.int32), ids])
    trains = np.arange(len(tokens)) >= len(prompt.token_ids)
    logprobs = np.where(trains, np.float32(-1), np.float32(0))
    sample = Sample(prompt, group, tokens, trains, logprobs, text, "stop", 0)
    return dataclasses.replace(sample, last_turn=text)


def mean(values: Sequence[float]) -> float:
    """Return the mean of the numbers among values, or NaN."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def spread(values: Sequence[float]) -> float:
    """Return the standard deviation of the numbers among values; 0 for fewer than two."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.stdev(known) if len(known) > 1 else 0.0
