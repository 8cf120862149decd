"""Advice on rewards that are noisy, coarse, or outweigh the others: what to put in their place, or beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean
from typing import Any, Final

from rlplug_watch.measures import Advice, direction_of, late_mean, quarters_of
from rlplug_watch.report.figures import reward_functions
from rlplug_watch.report.run_data import Metrics

NOISE: Final = 0.2
"""Share of a reward's variance within a prompt that equal completions have too. A choice, not a measurement."""
TIES: Final = 0.5
"""Share of pairs of a prompt's completions that a judge rates alike: of most pairs it says nothing. A choice too."""
RATED_HIGHEST: Final = 0.9
"""Share of the highest value that a judge gave, from which nine of ten completions are good, and ties no loss."""
SPREAD_RISE: Final = 4.0
"""How many times the spread (p10 to p90) of the first quarter changes the balance of rewards. A choice too."""
UNIT: Final = 2.0
"""Size of values up to which a spread that rises is that of a reward from 0 to 1, more of whose samples pass."""
LATE_SHARE: Final = 0.5
"""Share of the failures, from which the deadline is what to change."""


def late_rewards(metrics: Metrics) -> bool:
    """Return whether most rewards that failed missed their deadline."""
    late, failed = (metrics.series(name).values for name in ("reward_errors/late", "reward/error_share"))
    return bool(late) and fmean(late) > LATE_SHARE * fmean(failed)


def _asked(metrics: Metrics, reward: str, count: str = "requests") -> bool:
    """Return whether a reward, ``reward/<name>``, asks a model behind a server, and counts something of it."""
    return f"reward_counts/{reward.removeprefix('reward/')}/{count}" in metrics.columns


def _noisy(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    rewards = reward_functions(metrics)
    for reward in rewards:
        noise = late_mean(metrics, f"{reward}/noise")
        if noise is not None and noise > NOISE:
            yield Advice(
                f"{reward} is noisy: equal completions of a prompt got different values, {min(noise, 1):.0%} of its "
                "variance within a prompt in the last quarter of the run. Check answers by a verifier where prompts "
                "have them, take more votes (BestOfGroup) or comparisons (PairwiseJudge), or train with PFPPO, on the "
                "best and worst alone, with a kl_coefficient.",
                "model.rewards",
                "learned-rewards.md#noise",
                "MathVerify" if len(rewards) == 1 else "",
            )


def _coarse(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    for reward in reward_functions(metrics):
        ties = late_mean(metrics, f"{reward}/ties")
        low, highest = late_mean(metrics, f"{reward}/p10"), max(metrics.series(f"{reward}/p90").values, default=0.0)
        if ties is None or ties <= TIES or not _asked(metrics, reward) or _asked(metrics, reward, "comparisons"):
            continue
        if low is None or highest <= 0 or low < RATED_HIGHEST * highest:
            yield Advice(
                f"{reward} rated {ties:.0%} of the pairs of a prompt's completions alike in the last quarter of the "
                "run. Ask for a finer scale, or let PairwiseJudge compare them.",
                "model.rewards",
                "learned-rewards.md#noise",
            )


def _outweighing(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    rewards = reward_functions(metrics)
    for reward in rewards if len(rewards) > 1 else ():
        ends = [quarters_of(metrics.series(f"{reward}/p{percent}")) for percent in (10, 90)]
        if ends[0] is None or ends[1] is None:
            continue
        before, after = (fmean(high) - fmean(low) for low, high in zip(*ends, strict=True))
        size = max(abs(fmean(quarters[1])) for quarters in ends if quarters is not None)
        if before > 0 and after > SPREAD_RISE * before and size > UNIT:
            yield Advice(
                f"The spread of {reward} (p10 to p90) rose from {before:.3g} to {after:.3g}, and with it its part in "
                "the sum of rewards. Put ScaledReward around it, with scale: running or group, or clip.",
                "model.rewards",
                "rewards-and-data.md#clipped-and-scaled",
            )


def _deceived(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    """A judge that is ever more content while another reward falls."""
    rewards = reward_functions(metrics)
    changes = {name: direction_of(*found) for name in rewards if (found := quarters_of(metrics.series(name)))}
    fallen = [name for name, change in changes.items() if change < 0]
    for reward, change in changes.items():
        if change > 0 and fallen and _asked(metrics, reward):
            yield Advice(
                f"{reward} rose while {fallen[0]} fell: the policy may have found what the judge likes. Hold it near "
                "the reference policy, or give the judge less weight.",
                "model.algorithm.init_args.kl_coefficient",
                "algorithms.md#kl",
            )


REWARD_RULES: Final[tuple[Callable[[Metrics, Mapping[str, Any]], Iterator[Advice]], ...]] = (
    _noisy,
    _deceived,
    _coarse,
    _outweighing,
)
"""From what trains on a wrong signal to what trains on little."""
