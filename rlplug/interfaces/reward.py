"""Reward interface: a reward scores a sample, or says why it cannot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence

import torch

from rlplug.errors import ConfigError
from rlplug.types import Prompt, RewardError, Sample


class Reward(ABC):
    """Base class of rewards, which score samples.

    Args:
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); the class name in lower case by default.

    Attributes:
        batch_size: Number of samples in one :meth:`score` call. A failed or late call fails for all of them, so 1
            confines a failure to its sample; a reward model that gains from batches sets more.
        compares_group: Whether a :meth:`score` call gets all samples of one prompt, and none of another, because their
            rewards depend on each other. ``batch_size`` is not read then, and a failed call fails for the group.
        needs_answer: Whether no prompt can be scored without its answer: :meth:`check_prompts` refuses those.
        deadline_s: Longest time that the reward itself gives one call, in seconds. A run whose
            ``model.limits.reward_deadline_s`` is shorter is refused. ``None`` where the reward sets no such time.
        max_calls: Most :meth:`score` calls at once, where it is not ``async``: a wait for a turn counts in no deadline.
        scales: Whether a training scales its values: :class:`rlplug.rewards.scaling.ScalingReward`.
        scales_group: Whether it does so by comparing those of a prompt.
        of_environment: Whether it is the environment's own reward, with its name and values.
    """

    batch_size: int = 1
    compares_group: bool = False
    needs_answer: bool = False
    deadline_s: float | None = None
    max_calls: int | None = None
    scales: bool = False
    scales_group: bool = False
    of_environment: bool = False

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        self.weight = weight
        self.name = name or type(self).__name__.lower()

    def place(self, device: torch.device) -> None:  # noqa: B027 - most rewards need no device
        """Take the trainer's device of this rank; called once, before :meth:`notes`."""

    def device_bytes(self) -> tuple[int, bool]:
        """Return what the reward takes of each of the trainer's GPUs: bytes, and whether it keeps them between phases.

        Asked for the memory plan, before anything is loaded.

        Raises:
            ConfigError: The files that say so cannot be read.
        """
        return 0, False

    def notes(self) -> list[str]:
        """Start what scoring needs, and return what a person should know of it; called once, before the first step.

        Raises:
            ConfigError: Samples cannot be scored here.
        """
        return []

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that cannot be scored: by default those without an answer, where one is needed.

        Called before anything is loaded, with the prompts of each source; of a streamed source, with its first ones.

        Raises:
            ConfigError: A prompt's answer or metadata is not what the reward needs; the message names its uid.
        """
        if self.needs_answer and any(prompt.answer is None for prompt in prompts):
            from rlplug.interfaces.checks.reward_problems import explain_missing

            raise ConfigError(explain_missing(self.name, prompts))

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> list[float | RewardError] | Awaitable[list[float | RewardError]]:
        """Return a number of size 1e15 at most, or a :class:`RewardError`, for each sample; may be ``async``.

        Calls run concurrently, in threads (or on an event loop when ``async``), each with a list, answers and metadata
        of its own, which it may change. An exception or a missed deadline becomes a :class:`RewardError` for every
        sample of the call, and a NaN for its own sample.
        """

    def pop_counts(self) -> Mapping[str, float]:
        """Return counts since the last call, such as requests or tokens; a run adds them up over its ranks.

        They are logged as ``reward_counts/<name>/<count>``. Other threads may be in :meth:`score`.
        """
        return {}
