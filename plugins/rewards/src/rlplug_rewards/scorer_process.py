"""Scorers for the workers of :mod:`rlplug_rewards.isolation`, which import this module alone.

Requests come pickled from the trainer. Scores go back as text and are never unpickled, because these processes evaluate
what a model wrote. It imports nothing of rlplug, so that a worker needs neither torch nor its memory.
"""

from __future__ import annotations

import base64
import functools
import importlib
import itertools
import logging
import pickle
from collections.abc import Callable
from typing import Any


def math_verify_scorer() -> Callable[[str, str], float]:
    """Return a function that scores 1 when a completion's mathematical answer equals the reference, else 0."""
    library = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse(text: str) -> list[Any]:
        expressions: list[Any] = library.parse(text, parsing_timeout=None)
        return expressions

    def score(answer: str, completion: str) -> float:
        # math-verify looks for mathematics in prose; a bare answer such as "x^2+1" must be marked to be read whole
        marked = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
        gold = parse(answer if marked else f"\\boxed{{{answer}}}")
        if all(isinstance(expression, str) for expression in gold):
            raise ValueError(f"the prompt's answer {answer!r} is not mathematics that math-verify can parse")
        failure: Exception | None = None
        for expected, found in itertools.product(gold, parse(completion)):
            try:
                if library.verify(expected, found, timeout_seconds=None, raise_on_error=True):
                    return 1.0
            except Exception as error:  # noqa: BLE001 - another pair may still be equal
                failure = error
        if failure is not None:
            raise failure
        return 0.0

    return score


def reasoning_gym_scorer() -> Callable[[str, str | None, dict[str, Any]], float]:
    """Return a function that scores an answer with the task's own scorer."""
    scorer_of = functools.cache(importlib.import_module("reasoning_gym").get_score_answer_fn)

    def score(task: str, answer: str | None, entry: dict[str, Any]) -> float:
        return float(scorer_of(task)(answer, entry))

    # some tasks load data for a second, which each process of a sample would do again
    score.prepare = lambda task, *_: scorer_of(task)  # type: ignore[attr-defined]
    return score


SCORERS: dict[str, Callable[[], Callable[..., float]]] = {
    "math_verify": math_verify_scorer,
    "reasoning_gym": reasoning_gym_scorer,
}


def __getattr__(name: str) -> Callable[[str], float]:
    """Return a scorer by name, which imports its library: workers of the sandbox do so before they fork."""
    if name not in SCORERS:
        raise AttributeError(name)
    scorer = SCORERS[name]()

    def score(request: str) -> float:
        return scorer(*pickle.loads(base64.b64decode(request)))

    def prepare(request: str) -> None:
        if (load := getattr(scorer, "prepare", None)) is not None:
            load(*pickle.loads(base64.b64decode(request)))

    score.prepare = prepare  # type: ignore[attr-defined]
    return score
