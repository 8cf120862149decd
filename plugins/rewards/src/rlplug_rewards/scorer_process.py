"""Scorers for the workers of :mod:`rlplug_rewards.isolation`, which import this module alone.

Requests come pickled from the trainer. Scores go back as text and are never unpickled, because these processes evaluate
what a model wrote. It imports nothing of the package rlplug, so that a worker needs neither torch nor its memory.
"""

from __future__ import annotations

import base64
import functools
import importlib
import logging
import pickle
from collections.abc import Callable
from typing import Any


def math_verify_scorer() -> Callable[[list[str], str, bool], float]:
    """Return a function that scores 1 when an answer, or what prose says, means one of the references, else 0.

    Without references, it is whether math-verify can read the answer.
    """
    library = importlib.import_module("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    judging = importlib.import_module("rlplug_rewards.answers.judging")
    found = importlib.import_module("rlplug_rewards.answers.extraction").Found

    def parsed(text: str) -> list[Any]:
        expressions: list[Any] = library.parse(f"\\boxed{{{text}}}", parsing_timeout=None)
        return [each for each in expressions[:1] if not isinstance(each, str)]

    def verify(reference: str, answer: str) -> bool:
        gold, given = parsed(reference), parsed(answer)
        return bool(gold and given and library.verify(gold, given, timeout_seconds=None))

    def score(references: list[str], text: str, is_marked: bool) -> float:
        if not references:
            return float(bool(parsed(text)))
        return float(judging.judge(references, found(text, is_marked), verify))

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
