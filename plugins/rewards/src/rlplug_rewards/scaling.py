"""Reward around another one, which clips its values and scales them before the weight."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rlplug.errors import ConfigError
from rlplug.interfaces.reward import Reward
from rlplug.types import ENVIRONMENT, Prompt, RewardError, Sample

Values: TypeAlias = NDArray[np.float64]
ROW: Final = np.dtype([("group", np.int64), ("value", np.float64)])
"""What ranks tell each other of a sample."""
ROUND_OFF: Final = 1e-8
"""Spread of values, as a share of their size, that counts as none: dividing by it would train on round-off."""


class ScaledReward(Reward):
    r"""Reward whose values are clipped and scaled before its weight, where they train.

    Metrics, samples and validation have what ``reward`` returns. With :math:`v` clipped and :math:`w` its weight, the
    part in the sum that trains is

    .. math::
        w\,v \quad (none) \qquad w\,\frac{v - \mathrm{mean}_{group}(v)}{\mathrm{std}_{group}(v)} \quad (group) \qquad
        w\,\frac{v}{\mathrm{std}_{run}(v)} \quad (running)

    ``group`` is GDPO's (arXiv:2601.05242), which makes rewards of one prompt comparable before they are added up;
    ``running`` that of PPO's codes (arXiv:2005.12729), over all samples of the run so far, those of the round included.
    Deviations are unbiased, over all ranks' samples without a failed reward. By ``group``, a prompt whose
    values are equal, or that has one sample, gets 0; by ``running``, values stay as they are until two differ. A
    checkpoint has count, mean and deviation of ``running``; one without them starts anew.

    Args:
        reward: The reward, whose own weight is 1.
        clip: Lowest and highest value, ``[-5, 5]`` or ``[0, null]``.
        scale: By mean and deviation of a prompt (``group``), or the run's deviation (``running``).
        weight: Factor of this reward in the sum that trains.
        name: Key in metrics (``reward/<name>``); that of ``reward`` by default.

    Raises:
        ConfigError: An argument is out of range, or nothing would be changed.
    """

    scales = True

    def __init__(
        self,
        reward: Reward,
        clip: tuple[float | None, float | None] | None = None,
        scale: Literal["none", "group", "running"] = "none",
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name or reward.name)
        _check(reward, clip, scale)
        if reward.of_environment and self.name != reward.name:
            raise ConfigError(
                f"ScaledReward.name is {name!r}: leave it out, since the environment's reward has its own."
            )
        self.reward, self.clip, self.kind = reward, clip, scale
        self.batch_size, self.compares_group = reward.batch_size, reward.compares_group
        self.needs_answer, self.deadline_s = reward.needs_answer, reward.deadline_s
        self.of_environment = reward.of_environment
        self.scales_group = scale == "group"
        self.spread = RunningSpread()

    # ---- as the reward does -----------------------------------------------------------------------------------------

    def place(self, device: torch.device) -> None:
        self.reward.place(device)

    def device_bytes(self) -> tuple[int, bool]:
        return self.reward.device_bytes()

    def notes(self) -> list[str]:
        return self.reward.notes()

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        self.reward.check_prompts(prompts)

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError] | Awaitable[list[float | RewardError]]:
        return self.reward.score(samples)

    def pop_counts(self) -> Mapping[str, float]:
        return self.reward.pop_counts()

    # ---- where its values train -------------------------------------------------------------------------------------

    def scale(self, samples: Sequence[Sample], gather_arrays: Callable[[Any], Any]) -> Sequence[float]:
        """Return clipped and scaled values; those of samples with a failed reward count in nothing, and are 0."""
        valid = np.array([not sample.errors for sample in samples], np.bool_)
        mine = np.array([(each.group, each.rewards[self.name]) for each in samples if not each.errors], ROW)
        mine["value"] = clipped(mine["value"], self.clip)
        if self.kind == "running":
            # in the order of groups, so that any number of ranks adds up the same numbers in the same order
            everyone = gather_arrays(mine)
            self.spread.add(everyone["value"][np.argsort(everyone["group"], kind="stable")])
            mine["value"] /= self.spread.divisor
        elif self.kind == "group":
            mine["value"] = group_scaled(mine["value"], mine["group"])
        found = np.zeros(len(samples))
        found[valid] = mine["value"]
        return found.tolist()

    def state_dict(self) -> dict[str, Any]:
        return self.spread.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.spread = RunningSpread(**state)


class EnvironmentReward(Reward):
    """The environment's own reward, with a weight; ``ScaledReward`` clips and scales it.

    In ``model.rewards``, it is the reward that is there without it, and counts once.

    Args:
        weight: Factor of the environment's reward in the sum that trains; 1 without this class.
    """

    of_environment = True

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(weight, ENVIRONMENT)

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        missing = RewardError("there is no reward of an environment: EnvironmentReward needs model.environment")
        return [sample.rewards.get(ENVIRONMENT, missing) for sample in samples]


class RunningSpread:
    """Standard deviation of all values so far.

    Args:
        count: Number of values.
        mean: Their mean.
        squares: Sum of their squared differences from it.
    """

    def __init__(self, count: int = 0, mean: float = 0.0, squares: float = 0.0) -> None:
        self.count, self.mean, self.squares = count, mean, squares

    def add(self, values: Values) -> None:
        """Take values, float64 [n], into the deviation (Chan, Golub and LeVeque, 1979)."""
        if not len(values):
            return
        mean, total = float(values.mean()), self.count + len(values)
        difference = mean - self.mean
        self.squares += float(np.square(values - mean).sum()) + difference**2 * self.count * len(values) / total
        self.mean += difference * len(values) / total
        self.count = total

    @property
    def divisor(self) -> float:
        """The deviation, or 1 where the values so far are fewer than two, or equal but for round-off."""
        std = math.sqrt(self.squares / max(self.count - 1, 1))
        return std if std > ROUND_OFF * abs(self.mean) else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}


def clipped(values: Values, clip: tuple[float | None, float | None] | None) -> Values:
    """Return values, those outside of the bounds set to them; ``None`` is no bound."""
    low, high = clip or (None, None)
    return np.clip(values, -math.inf if low is None else low, math.inf if high is None else high)


def group_scaled(values: Values, groups: NDArray[np.int64]) -> Values:
    """Return each value less its group's mean, over its group's deviation; 0 where the values of a group are equal."""
    of_row, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    centred = values - (np.bincount(of_row, values) / sizes)[of_row]
    std = np.sqrt(np.bincount(of_row, np.square(centred)) / np.maximum(sizes - 1, 1))
    largest = np.zeros(len(sizes))
    np.maximum.at(largest, of_row, np.abs(values))
    differs = std > ROUND_OFF * largest
    return np.where(differs[of_row], centred / np.where(differs, std, 1.0)[of_row], 0.0)


def _check(reward: Reward, clip: tuple[float | None, float | None] | None, scale: str) -> None:
    if scale not in ("none", "group", "running"):
        raise ConfigError(f"ScaledReward.scale is {scale!r}: give none, group or running.")
    if reward.scales:
        raise ConfigError("ScaledReward.reward scales by itself: give the reward inside of it.")
    if reward.weight != 1:
        raise ConfigError(
            f"ScaledReward.reward has the weight {reward.weight:g}, which would not count: give it to ScaledReward."
        )
    if clip is None:
        if scale == "none":
            raise ConfigError("ScaledReward has neither clip nor scale: set one, or name its reward alone.")
        return
    if len(clip) != 2 or any(bound is not None and math.isnan(bound) for bound in clip):
        raise ConfigError(
            f"ScaledReward.clip is {list(clip)}: give the lowest and the highest value, or null for none."
        )
    low, high = clip
    if low is None and high is None:
        raise ConfigError("ScaledReward.clip is [null, null], which bounds nothing: give a bound, or remove it.")
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"ScaledReward.clip is {list(clip)}: give a lowest value below the highest.")
