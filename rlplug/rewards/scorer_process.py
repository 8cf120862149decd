"""Program of a scoring child process, which :mod:`rlplug.rewards.isolation` runs as a script.

Requests come pickled on standard input from the parent. Replies go back as one line of JSON each and are never
pickled, because this process evaluates what a model wrote. It imports nothing of rlplug, so that a child needs neither
torch nor its memory.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import logging
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY_LIMIT_BYTES = 4 * 2**30
"""Memory limit of a child in bytes. A number with billions of digits raises MemoryError before it fills the host."""


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

    return score


SCORERS: dict[str, Callable[[], Callable[..., float]]] = {
    "math_verify": math_verify_scorer,
    "reasoning_gym": reasoning_gym_scorer,
}


def main(scorer: str, timeout_s: float) -> None:
    """Answer requests until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides
    # With the default action the kernel ends the process, even inside one endless C call.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the replies
    score = SCORERS[scorer]()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            reply: dict[str, Any] = {"score": score(*request)}
        except BaseException as error:  # noqa: BLE001 - evaluated text may also raise SystemExit
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
