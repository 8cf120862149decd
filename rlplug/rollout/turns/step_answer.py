"""What an environment's step returned, checked: the only way from an environment into a trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlplug.errors import brief, encodable
from rlplug.interfaces.environment import Message, StepResult
from rlplug.interfaces.plain_values import as_number, as_reward, json_problem
from rlplug.timeouts import CallError

OWN_METRICS: Final = ("seconds", "failures", "timed_out_threads")
"""Names under ``environment/`` that rlplug itself logs."""
MAX_METRICS: Final = 100
"""Most metrics of a step, and most characters of a metric's name."""

Observation = str | Sequence[Message]


@dataclass(frozen=True)
class StepAnswer:
    """A :class:`~rlplug.interfaces.environment.StepResult` of plain values that were checked."""

    text: str | None
    """What the policy's tokenizer gets next; ``None`` where it cannot fit the trajectory, and empty if ``done``."""
    reward: float
    done: bool
    metrics: Mapping[str, float]


def read_step(returned: Any, to_text: Callable[[Observation], str], longest: int) -> StepAnswer:
    """Return what a step returned, after checks of everything that is used of it.

    Args:
        returned: The returned value.
        to_text: Returns an observation as text for the tokenizer, or raises an error.
        longest: Most characters of an observation that can fit the trajectory.

    Raises:
        CallError: It is no ``StepResult``, or a part of it cannot be used.
    """
    if not isinstance(returned, StepResult):
        raise CallError(f"step returned {brief(returned)} and not a StepResult")
    if not isinstance(returned.done, bool) and type(returned.done).__name__ not in ("bool", "bool_"):
        raise CallError(f"step returned {brief(returned.done)} as done, which is true or false")
    try:
        reward = as_reward(returned.reward)
    except CallError as problem:
        raise CallError(f"step returned the reward {problem}") from None
    metrics, done = _metrics(returned.metrics), bool(returned.done)
    return StepAnswer("" if done else _text(returned.observation, to_text, longest), reward, done, metrics)


def _metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise CallError(f"step returned {brief(metrics)} as metrics: give at most {MAX_METRICS} numbers by name")
    checked = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_METRICS:
            raise CallError(f"step returned a metric named {brief(name)}: give printable text of up to 100 characters")
        if name in OWN_METRICS:
            raise CallError(f"step returned a metric named {name!r}, which is one of rlplug's own")
        try:
            checked[name] = as_number(value)
        except CallError as problem:
            raise CallError(f"step returned the metric {name!r} {problem}") from None
    return checked


def _text(observation: Any, to_text: Callable[[Observation], str], longest: int) -> str | None:
    if isinstance(observation, str):
        num_characters = len(observation)
    else:
        if isinstance(observation, bytes) or not isinstance(observation, Sequence):
            raise CallError(f"step returned {brief(observation)} as observation: give text, or a list of messages")
        for message in observation:
            fields = [message.get("role"), message.get("content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(field, str) for field in fields):
                raise CallError(f"step returned the message {brief(message)}: give a role and a content, both text")
        num_characters = sum(len(message["content"]) for message in observation)
    if num_characters > longest:
        return None
    plain = observation if isinstance(observation, str) else list(observation)
    if problem := json_problem(plain):
        raise CallError(f"step returned an observation with {problem}")
    return encodable(to_text(plain))
