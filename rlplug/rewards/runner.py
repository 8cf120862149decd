"""Runner of the rewards phase: calls every reward on every sample concurrently, each call with a deadline."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import ConfigError, RunError, shorten
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.metrics import read_metrics
from rlplug.interfaces.checks.process_state import watched
from rlplug.interfaces.plain_values import MAX_REWARD, SUMMARY_NAMES
from rlplug.interfaces.reward import Reward
from rlplug.rewards.scores import own_copy, read_scores, weighted_sum
from rlplug.timeouts import CallBatch, TimeoutExecutor
from rlplug.types import ENVIRONMENT, TRAJECTORY, RewardError, Sample

_NAME: Final = re.compile(r"\w[\w.-]{0,99}")


class RewardRunner:
    """Runner that scores samples with several rewards. A reward that fails becomes a :class:`RewardError`, never a 0.

    Args:
        rewards: Rewards with different names; at least one, unless there is an environment that rewards.
        deadline_s: Longest time for one :meth:`Reward.score` call in seconds, from when it starts to run.
        max_concurrency: Largest number of calls of a reward at a time.
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
        for reward in rewards:
            if reward.deadline_s is not None and not reward.deadline_s <= deadline_s:
                raise ConfigError(
                    f"model.rewards: reward {reward.name!r} gives a call {reward.deadline_s:g} s, and "
                    f"model.limits.reward_deadline_s ends it after {deadline_s:g} s: raise that, or lower the reward's "
                    "init_args.deadline_s."
                )
        self.rewards = tuple(rewards)
        self.weights = {ENVIRONMENT: 1.0} | {reward.name: float(reward.weight) for reward in rewards}
        self.seconds = dict.fromkeys((reward.name for reward in rewards), 0.0)
        """Seconds of each reward from the start of its first call to the end of its last, summed over rounds."""
        self._scaling: list[Any] = [reward for reward in rewards if reward.scales]
        self.max_error_share = max_error_share
        self.has_environment = has_environment
        self._calls = TimeoutExecutor(deadline_s, max_concurrency)

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with complete ``rewards`` and ``reward``; ``reward`` is NaN when any reward failed."""
        parts = [_calls_of(reward, samples) for reward in self.rewards]
        # rewards run side by side: which of several has changed the process cannot be told
        with watched(PluginCall(" or ".join(str(PluginCall(each, "score")) for each in self.rewards) or ENVIRONMENT)):
            batches = [CallBatch(reward.max_calls) for reward in self.rewards]
            all_calls = [
                self._calls.add(
                    batch,
                    [functools.partial(_score, reward, [samples[index] for index in part]) for part in own],
                    [functools.partial(read_scores, num_samples=len(part)) for part in own],
                )
                for batch, reward, own in zip(batches, self.rewards, parts, strict=True)
            ]
            self._calls.finish(batches)
        values: list[dict[str, float | RewardError]] = [dict(sample.rewards) for sample in samples]
        for reward, own, calls in zip(self.rewards, parts, all_calls, strict=True):
            for part, call in zip(own, calls, strict=True):
                scores = [RewardError(call.error, call.kind)] * len(part) if call.error else call.value
                for index, value in zip(part, scores, strict=True):
                    values[index][reward.name] = value
            ends = (call.started + call.seconds for call in calls)
            self.seconds[reward.name] += max(ends, default=0.0) - min((call.started for call in calls), default=0.0)
        return [
            dataclasses.replace(sample, reward=weighted_sum(by_name, self.weights), rewards=by_name)
            for sample, by_name in zip(samples, values, strict=True)
        ]

    def scale(self, samples: list[Sample], gather_arrays: Callable[[Any], Any]) -> list[Sample]:
        """Return samples that train, by ascending group, with ``scaled_reward`` where a reward scales. Collective."""
        if not self._scaling:
            return samples
        from rlplug.rewards.scaling import scaled_samples

        return scaled_samples(self._scaling, self.weights, samples, gather_arrays)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rewards that scale, by their names."""
        return {reward.name: reward.state_dict() for reward in self._scaling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a reward that is not in it starts anew."""
        for reward in self._scaling:
            reward.load_state_dict(state.get(reward.name, {}))

    @property
    def names(self) -> list[str]:
        """Names of all rewards of a sample, in order."""
        own = [reward.name for reward in self.rewards]
        return list(dict.fromkeys([ENVIRONMENT, *own])) if self.has_environment else own

    def check(self, samples: Sequence[Sample], ranks: RLFSDP2Strategy) -> None:
        """Stop the run, on all ranks together, when too many samples have no reward. Collective.

        Raises:
            RunError: The share of samples with an error is above ``max_error_share``.
        """
        failed = [sample for sample in samples if sample.errors]
        num_failed, num_samples = ranks.gather_arrays(np.array([[len(failed), len(samples)]])).sum(axis=0).tolist()
        if not num_failed or num_failed / num_samples <= self.max_error_share:
            return
        first = sorted(failed, key=lambda sample: sample.group)[:1]
        firsts = [(each.group, *next(iter(each.errors.items())), each.prompt.uid) for each in first]
        _, name, error, uid = min(ranks.gather(firsts), key=lambda first: first[0])
        calls = [PluginCall(reward, "score") for reward in self.rewards if reward.name == name]
        source = "".join(f", {call}," for call in calls if not call.is_of_core)
        from rlplug.interfaces.checks.reward_problems import explain_failed

        raise RunError(
            f"{num_failed} of {num_samples} samples ({num_failed / num_samples:.0%}) have no reward; "
            f"model.limits.max_reward_error_share allows {self.max_error_share:.0%}. "
            f"{explain_failed(name, source, error.message, uid)}"
        )

    def stats(self) -> dict[str, float]:
        """Return metrics of the runner itself."""
        return {"reward/timed_out_threads": float(self._calls.num_abandoned)}

    def pop_counts(self, ranks: RLFSDP2Strategy) -> dict[str, float]:
        """Return the rewards' own counts since the last call, as metrics, added up over all ranks. Collective.

        Raises:
            RunError: A reward returned something else than numbers by name.
        """
        if not self._counting:
            return {}
        total: Counter[str] = Counter()
        for counts in ranks.gather([self.pop_own_counts()]):
            total.update(counts)
        return {f"reward_counts/{name}": value for name, value in total.items()}

    def pop_own_counts(self) -> dict[str, float]:
        """Return the counts of this process's rewards since the last call, by ``<reward>/<count>``.

        Raises:
            RunError: A reward returned something else than numbers by name.
        """
        return {
            f"{reward.name}/{name}": value
            for reward in self._counting
            for name, value in read_metrics(PluginCall(reward, "pop_counts"), reward.pop_counts()).items()
        }

    @property
    def _counting(self) -> list[Reward]:
        return [reward for reward in self.rewards if type(reward).pop_counts is not Reward.pop_counts]


def start_rewards(rewards: Sequence[Reward], device: torch.device) -> list[str]:
    """Give rewards their device, start what they need, and return what a person should know of them.

    Raises:
        ConfigError: Samples cannot be scored here.
    """
    for reward in rewards:
        reward.place(device)
    return [note for reward in rewards for note in reward.notes()]


def _calls_of(reward: Reward, samples: Sequence[Sample]) -> list[Sequence[int]]:
    """Return the indices of the samples of each call of a reward."""
    if not reward.compares_group:
        indices = range(len(samples))
        return [indices[start : start + reward.batch_size] for start in indices[:: reward.batch_size]]
    by_group: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_group.setdefault(sample.group, []).append(index)
    return list(by_group.values())


def _score(reward: Reward, samples: Sequence[Sample]) -> Any:
    """Return what a reward returns, which nobody has checked; it may be awaitable."""
    return reward.score([own_copy(sample) for sample in samples])


def _check_rewards(rewards: Sequence[Reward], has_environment: bool) -> None:
    if not rewards:
        if has_environment:
            return
        raise ConfigError("model.rewards is empty: name at least one reward, or a model.environment that rewards.")
    name, count = Counter(reward.name for reward in rewards).most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"model.rewards has {count} rewards named {name!r}: give each its own init_args.name, its key in metrics."
        )
    for reward in rewards:
        if not _NAME.fullmatch(reward.name):
            raise ConfigError(
                f"model.rewards has a reward named {shorten(reward.name)}, and names are keys of metrics and parts of "
                "pages: give it an init_args.name of letters, digits, _, - and ., at most 100."
            )
        own = (ENVIRONMENT,) if has_environment and reward.of_environment else ()
        if reward.name not in own and (own or reward.name in (*SUMMARY_NAMES, ENVIRONMENT, TRAJECTORY)):
            raise ConfigError(
                f"model.rewards has a reward named {reward.name!r}, and reward/{reward.name} is a metric of all "
                "rewards together: give it another init_args.name. The environment's own needs model.environment."
            )
        if not isinstance(reward.weight, int | float) or not abs(reward.weight) <= MAX_REWARD:
            raise ConfigError(
                f"model.rewards: the weight of reward {reward.name!r} is {reward.weight!r}: give a finite number."
            )
        if reward.batch_size < 1:
            raise ConfigError(f"model.rewards: {reward.name!r} has batch_size {reward.batch_size}: give at least 1.")
