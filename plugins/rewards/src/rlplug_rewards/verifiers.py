"""Rewards of the extra ``rlplug-rewards[reasoning]``: math-verify, and the scorers of reasoning-gym."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from rlplug.errors import ConfigError
from rlplug.types import Prompt, RewardError
from rlplug_rewards.answer_reward import AnswerReward
from rlplug_rewards.answers.extraction import Found
from rlplug_rewards.answers.references import accepted_answers, as_mathematics, as_text, needs_fallback
from rlplug_rewards.isolation import ScorerPool


class MathVerify(AnswerReward):
    r"""Reward of 1.0 when the answer in a completion means what the prompt's does, else 0.0.

    Numbers, units, sets, intervals, equations and expressions are compared by meaning: docs/answers.md has the rules.
    Notation that these do not know, such as an integral, is compared by math-verify. The prompt's answer is plain text
    or LaTeX (``1/2``, ``\frac{1}{2}``, ``$x^2+1$``), a number, or a list of those that are accepted; a solution may
    mark it with ``####`` or ``\boxed{}``. One that cannot be read stops the run at its start. Each sample is scored
    in a process of its own, and a comparison that takes too long is an error.

    Args:
        answer_pattern: Regular expression with a capture group: the first group of its last match after the thought is
            the answer, and nothing else is. By default, it is what the last ``<answer>`` or ``\boxed{}`` marks, or what
            a sentence such as "The answer is 4." or the last sentence says.
        finished_only: Give 0 to completions that a limit of tokens or turns cut off.
        marked_only: Give 0 where nothing marks the answer.
        timeout_s: Longest time for one sample, in seconds.
        num_processes: Samples that are scored at once, per rank.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``mathverify`` by default.
    """

    def __init__(
        self,
        answer_pattern: str | None = None,
        finished_only: bool = False,
        marked_only: bool = False,
        timeout_s: float = 5.0,
        num_processes: int = 4,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(answer_pattern, finished_only, marked_only, weight, name)
        self._pool = _pool("MathVerify", "math_verify", num_processes, timeout_s)
        self.max_calls = num_processes
        self._readable: set[str] = set()

    def pop_counts(self) -> Mapping[str, float]:
        return self.found.pop()

    def notes(self) -> list[str]:
        return [f"{self.name}: {self._pool.isolation()}"]

    def check_prompt(self, prompt: Prompt) -> None:
        for text in self._references(prompt):
            if text in self._readable:
                continue
            if needs_fallback(text) and self._pool.score([], text, True) != 1.0:
                raise ValueError(f"{text!r} is not mathematics that math-verify can parse")
            self._readable.add(text)

    def score_answer(self, prompt: Prompt, found: Found) -> float | RewardError:
        if found.is_cut_off:
            return 0.0
        return self._pool.score(self._references(prompt), found.text, found.is_marked)

    def _references(self, prompt: Prompt) -> list[str]:
        return [as_mathematics(as_text(answer)) for answer in accepted_answers(prompt.answer)]


class ReasoningGymReward(AnswerReward):
    """Reward from 0 to 1 that the task's own scorer in reasoning-gym gives.

    The prompt's metadata holds ``task`` (the name of the reasoning-gym data set) and ``entry`` (its item, as
    generated). Some scorers pass the answer to Python's ``eval``, so each sample is scored in a process of its own in
    the sandbox of tools: not as root, without a network or the trainer's environment variables.

    Args:
        answer_pattern: Regular expression with a capture group: the first group of its last match after the thought is
            the answer, and a completion without a match gets 0. By default the answer is the text in the last
            ``<answer>...</answer>`` or box, or all that follows the thought, stripped, where there is neither.
        finished_only: Give 0 to completions that a limit of tokens or turns cut off.
        marked_only: Give 0 where nothing marks the answer.
        timeout_s: Longest time for one sample, in seconds.
        num_processes: Samples that are scored at once, per rank.
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); ``reasoninggymreward`` by default.
    """

    needs_answer = False

    def __init__(
        self,
        answer_pattern: str | None = None,
        finished_only: bool = False,
        marked_only: bool = False,
        timeout_s: float = 5.0,
        num_processes: int = 4,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(answer_pattern, finished_only, marked_only, weight, name)
        self._pool = _pool("ReasoningGymReward", "reasoning_gym", num_processes, timeout_s)
        self.max_calls = num_processes

    def notes(self) -> list[str]:
        return [f"{self.name}: {self._pool.isolation()}"]

    def score_answer(self, prompt: Prompt, found: Found) -> float | RewardError:
        task, entry = prompt.metadata.get("task"), prompt.metadata.get("entry")
        if not isinstance(task, str) or not isinstance(entry, Mapping):
            return RewardError(
                "the prompt's metadata lacks 'task' (a name) or 'entry' (the reasoning-gym item): "
                "ReasoningGymReward needs both"
            )
        return self._pool.score(task, found.text.strip(), dict(entry))


def _pool(reward: str, package: str, num_processes: int, timeout_s: float) -> ScorerPool:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{reward} needs the package {package}: pip install 'rlplug-rewards[reasoning]'.")
    settings: dict[str, Any] = {"num_processes": num_processes, "timeout_s": timeout_s}
    for key, value in settings.items():
        if value <= 0:
            raise ConfigError(f"{reward}.{key} is {value}: give a positive number.")
    return ScorerPool(package, num_processes, timeout_s)
