"""Environment interface: an environment answers the policy after each of its turns, and rewards it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rlplug.types import Prompt

Message: TypeAlias = Mapping[str, Any]
"""A chat message: ``role`` and ``content``, and whatever else the policy's chat template reads."""


@dataclass(frozen=True)
class StepResult:
    """Answer of an environment to one turn of the policy.

    Attributes:
        observation: Text or messages that the policy sees next, such as a tool's results; a chat policy gets text as a
            user message. Ignored when ``done``.
        reward: Reward of this turn, of size 1e15 at most; a trajectory's reward is the sum over its turns.
        done: Whether the trajectory ends with this turn.
        metrics: Metrics by name, logged as ``environment/<name>``: the mean over the step's answers that have it.
    """

    observation: str | Sequence[Message] = ""
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(ABC):
    """Base class of environments: an object gets one trajectory's prompt, then the policy's turns, and answers each.

    Every trajectory has an object of its own, made with the ``init_args`` of the YAML file. Calls of many objects run
    at once, each in a thread, or on an event loop where a method is ``async``, and each has a deadline. When a call
    raises or hangs, only its own trajectory is lost: it has no reward and does not train.

    A checkpoint keeps the turns of an unfinished trajectory, not this object: a resumed run makes a new object and
    repeats the same calls. Randomness must therefore come from ``random.Random(seed)`` alone.

    Attributes:
        response_template: The tokenizer's rules, where it has some, with which transformers parses a turn; set before
            ``reset``.
    """

    response_template: Mapping[str, Any] | None = None

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools, for the chat template; called on one object at start."""
        return ()

    def notes(self) -> list[str]:
        """Return what a person should know of it; called on one object at start, after :meth:`tools`."""
        return []

    def reset(self, prompt: Prompt, seed: int) -> Awaitable[None] | None:
        """Begin a trajectory with a copy of the policy's ``prompt`` and a ``seed`` of its own; may be ``async``."""
        return None

    @abstractmethod
    def step(self, completion: str) -> StepResult | Awaitable[StepResult]:
        """Answer a turn of the policy; may be ``async``.

        Args:
            completion: Text of the turn, without the end token but with all other special tokens.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release the trajectory's resources; called once, also after a failure, with the deadline of a step."""
