"""The environment seam: what answers the policy after each of its turns, and rewards it."""

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
    """How an environment answers one turn of the policy."""

    observation: str | Sequence[Message] = ""
    """What the policy sees next: text, which a chat policy gets as a user message, or messages, such as a tool's
    results. Not looked at when ``done``."""
    reward: float = 0.0
    """Of this turn; a trajectory's reward is the sum over its turns."""
    done: bool = False
    """No further turn follows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Logged as ``environment/<name>``, the mean over the step's answers that have it."""


class Environment(ABC):
    """One trajectory's counterpart: it sees a prompt, then the policy's turns, and answers each.

    Every trajectory gets an object of its own, made with the ``init_args`` that the YAML file gives. Calls of many run
    at once, each in a thread, or on an event loop where a method is ``async``; each has a deadline. One that raises or
    hangs costs its own trajectory, which then has no reward and does not train, and nothing else.

    An unfinished trajectory in a checkpoint holds its turns, not this object: a resumed run makes a new one and gives
    it the same calls again. So draw from ``random.Random(seed)`` alone.
    """

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of what the policy may call, for the chat template; asked of one object at start."""
        return ()

    def reset(self, prompt: Prompt, seed: int) -> Awaitable[None] | None:
        """Begin; ``prompt`` is what the policy got, and ``seed`` is of this trajectory alone. May be ``async``."""
        return None

    @abstractmethod
    def step(self, completion: str) -> StepResult | Awaitable[StepResult]:
        """Answer a turn of the policy; may be ``async``.

        Args:
            completion: The turn's text, without the end token. Other special tokens are in it.
        """

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what the trajectory held; called once, also after a failure. Must not block."""
