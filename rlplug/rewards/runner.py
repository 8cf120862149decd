"""Runner of the rewards phase: calls every reward on every sample concurrently, each call with a deadline."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces.reward import SUMMARY_NAMES, Reward
from rlplug.timeouts import Call, DeadlineError, TimeoutExecutor
from rlplug.types import ENVIRONMENT, RewardError, Sample


class RewardRunner:
    """Runner that scores samples with several rewards. A reward that fails becomes a :class:`RewardError`, never a 0.

    Args:
        rewards: Rewards with different names; at least one, unless there is an environment that rewards.
        deadline_s: Longest time for one :meth:`Reward.score` call in seconds, from when it starts to run.
        max_concurrency: Largest number of calls at a time.
        max_error_share: Largest share of samples with an error that :meth:`check` accepts.
        has_environment: Whether samples come with a reward of their environment, or its error, to which these rewards
            are added.

    Raises:
        ConfigError: An argument is out of range, or two rewards have the same name.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        deadline_s: float = 30.0,
        max_concurrency: int = 64,
        max_error_share: float = 0.1,
        has_environment: bool = False,
    ) -> None:
        _check_rewards(rewards, has_environment)
        if not deadline_s > 0:
            raise ConfigError(f"model.limits.reward_deadline_s is {deadline_s}: give a positive number of seconds.")
        if max_concurrency < 1:
            raise ConfigError(f"the rewards' max_concurrency is {max_concurrency}: give at least 1.")
        if not 0 <= max_error_share <= 1:
            raise ConfigError(
                f"model.limits.max_reward_error_share is {max_error_share}: give a share from 0 (stop at the first "
                "error) to 1 (never stop)."
            )
        self.rewards = tuple(rewards)
        self.max_error_share = max_error_share
        self._calls = TimeoutExecutor(deadline_s, max_concurrency)

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with complete ``rewards`` and ``reward``; ``reward`` is NaN when any reward failed."""
        tasks = [
            (reward, start, samples[start : start + reward.batch_size])
            for reward in self.rewards
            for start in range(0, len(samples), reward.batch_size)
        ]
        calls = self._calls.run([functools.partial(reward.score, part) for reward, _, part in tasks])
        values: list[dict[str, float | RewardError]] = [dict(sample.rewards) for sample in samples]
        for (reward, start, part), call in zip(tasks, calls, strict=True):
            for index, value in enumerate(_values_of(call, len(part)), start):
                values[index][reward.name] = value
        return [
            dataclasses.replace(sample, rewards=by_name, reward=self._weighted_sum(by_name))
            for sample, by_name in zip(samples, values, strict=True)
        ]

    def check(self, samples: Sequence[Sample]) -> None:
        """Stop the run when too many samples have no reward.

        Args:
            samples: The scored samples of all ranks, so that all stop together.

        Raises:
            RunError: The share of samples with an error is above ``max_error_share``.
        """
        failed = [sample for sample in samples if sample.errors]
        if not failed or len(failed) <= self.max_error_share * len(samples):
            return
        name, error = next(iter(failed[0].errors.items()))
        raise RunError(
            f"{len(failed)} of {len(samples)} samples ({len(failed) / len(samples):.0%}) have no reward; "
            f"model.limits.max_reward_error_share allows {self.max_error_share:.0%}. First error, of reward {name!r} "
            f"on prompt {failed[0].prompt.uid!r}: {error.message}. {_remedy(name)}, or raise "
            "model.limits.max_reward_error_share."
        )

    def stats(self) -> dict[str, float]:
        """Return metrics of the runner itself."""
        return {"reward/abandoned_threads": float(self._calls.num_abandoned)}

    def _weighted_sum(self, by_name: dict[str, float | RewardError]) -> float:
        weights = {ENVIRONMENT: 1.0} | {reward.name: reward.weight for reward in self.rewards}
        total = 0.0
        for name, value in by_name.items():
            if isinstance(value, RewardError):
                return math.nan  # so that it cannot pass for a reward
            total += weights[name] * value
        return total


def _remedy(name: str) -> str:
    if name == ENVIRONMENT:
        return "Correct model.environment or its data, raise model.turns.step_deadline_s if it needs longer"
    return "Correct that reward in model.rewards or its data, raise model.limits.reward_deadline_s if it needs longer"


def _check_rewards(rewards: Sequence[Reward], has_environment: bool) -> None:
    if not rewards:
        if has_environment:
            return
        raise ConfigError("model.rewards is empty: name at least one reward, or a model.environment that rewards.")
    name, count = Counter(reward.name for reward in rewards).most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"model.rewards has {count} rewards named {name!r}: give each its own init_args.name, "
            "since it is their key in the metrics."
        )
    for reward in rewards:
        if reward.name in (*SUMMARY_NAMES, ENVIRONMENT):
            raise ConfigError(
                f"model.rewards has a reward named {reward.name!r}, and reward/{reward.name} is a metric of all "
                "rewards together: give it another init_args.name."
            )
        if reward.batch_size < 1:
            raise ConfigError(
                f"model.rewards: reward {reward.name!r} has batch_size {reward.batch_size}: give at least 1."
            )


def _values_of(call: Call, num_samples: int) -> list[float | RewardError]:
    """Return a finite number or an error for each of the call's samples."""
    if call.error is not None:
        return [RewardError(_text_of(call.error))] * num_samples
    try:
        values = list(call.value)
    except TypeError:
        values = None
    if values is None or isinstance(call.value, str | bytes | dict):
        return [RewardError(f"returned {_short(call.value)}, not a list of numbers")] * num_samples
    if len(values) != num_samples:
        return [RewardError(f"returned {len(values)} values for {num_samples} samples")] * num_samples
    return [_number_or_error(value) for value in values]


def _number_or_error(value: Any) -> float | RewardError:
    if isinstance(value, RewardError):
        return value
    if not hasattr(value, "__float__"):  # float() itself would take the string "1.0"
        return RewardError(f"returned {_short(value)}, which is not a number")
    try:
        number = float(value)
    except Exception as error:  # noqa: BLE001 - a tensor of several elements, an integer beyond all floats
        return RewardError(f"returned {_short(value)}, which is not a number: {error}")
    return number if math.isfinite(number) else RewardError(f"returned {number}, which is not finite")


def _text_of(error: BaseException) -> str:
    if isinstance(error, DeadlineError):
        return str(error)
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f" (at {os.path.basename(last.tb_frame.f_code.co_filename)}:{last.tb_lineno})" if last else ""
    return f"{type(error).__name__}: {error}{where}"


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
