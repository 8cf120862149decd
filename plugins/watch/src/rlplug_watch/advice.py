"""Advice in words: what a run's metrics say went wrong, which option to change, and where that is explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import fmean, median
from typing import Any, Final

from rlplug_watch.engine_advice import ENGINE_RULES, IDLE_RULES
from rlplug_watch.measures import LEAST_STEPS, Advice, direction_of, is_on_gpu, late_mean, quarters_of
from rlplug_watch.report.run_data import Metrics
from rlplug_watch.reward_advice import REWARD_RULES, late_rewards

MOST: Final = 5
"""Most pieces of advice about a run."""

TRUNCATED: Final = 0.1
"""Share of completions cut at their longest length, in the last quarter. In ``benchmarks/results``, runs whose mean
reward ended above 0.4 had at most 0.023 there, and one that ended at 0.31 had 0.94."""
NO_SIGNAL: Final = 0.5
"""Share of groups whose rewards are equal: more than half of what is generated trains nothing. DAPO (arXiv 2503.14476,
section 3.2) drops such groups. The runs of SmolLM2 in ``benchmarks/results`` ended with 0.86 to 0.88, the quickstart,
which learns to its end, with 0.46."""
SOLVED: Final = 0.9
"""Share of the highest reward that a run saw, from which its mean counts as solved: 90% of the prompts, if rewards are
0 and 1. The number is a choice, not a measurement."""
ENTROPY_SPENT: Final = 0.73
"""Share of its entropy that a policy loses while it makes 76% of its gain in reward, in the mean over 11 models
(arXiv 2505.22617, section 2.4). A policy that has lost more, and has not gained, does not explore any more."""
ENTROPY_STEPS: Final = 5
"""Steps over which an entropy is averaged."""
LEAST_ENTROPY_STEPS: Final = 40
"""Fewest steps after which a fallen entropy counts: a run of 20 in ``benchmarks/results`` still rose at its end."""
MISMATCH_RISE: Final = 4.0
"""How many times the mismatch of the first quarter is a rise; the factor of a jump in ``docs/the-step.md``."""
LEAST_MISMATCH: Final = 0.01
"""Mismatch in nats below which a rise is no matter: a tenth of the limit for bfloat16."""
REWARD_ERRORS: Final = 0.01
"""Share of samples whose reward failed. The run stops at ``model.limits.max_reward_error_share``, 0.1 by default."""
WAITING: Final = 0.2
"""Share of the time that one side of an asynchronous run waits for the other."""
API_BUSY: Final = 0.9
"""Share of a core above which a process that answers a server's requests may hold back what the engine generates."""
PROMPTS_SHARE: Final = 0.2
"""Share of the time in which nothing happens but that prompts are read. A choice, not a measurement."""
ROLLOUT_SHARE: Final = 0.7
"""Share of a step that is the rollout. Above it an update that ran meanwhile would save less than 30% of the time: the
engine itself has to become faster."""
MEMORY_USED: Final = 0.5
"""Share of a GPU's memory that the update has taken at its peak. What a pass needs grows at most in proportion to its
tokens, so below a half twice as many fit."""


def advise(metrics: Metrics, info: Mapping[str, Any]) -> list[Advice]:
    """Return what a run's metrics suggest, the most severe first; nothing about what was not measured.

    Args:
        metrics: Metrics of a run that has ended or goes on.
        info: Contents of ``run.json``.

    Returns:
        At most ``MOST`` pieces.
    """
    rules = RULES if metrics.num_trained >= LEAST_STEPS else RULES_OF_SHORT_RUNS
    found = (advice for rule in rules for advice in rule(metrics, info))
    return [advice for _, advice in zip(range(MOST), found, strict=False)]


# ---- what is measured -----------------------------------------------------------------------------------------------


def _learning_rate_is_zero(metrics: Metrics) -> bool:
    rates = metrics.series("policy/lr").values
    return bool(rates) and not any(rates)


def _never_differs(metrics: Metrics) -> bool:
    """Return whether no step had two rewards that differ."""
    spread = metrics.series("reward/std").values
    return bool(spread) and not any(spread)


def _is_solved(metrics: Metrics) -> bool:
    late = late_mean(metrics, "reward/mean")
    highest = max(metrics.series("reward/max").values or metrics.series("reward/mean").values, default=0.0)
    return late is not None and highest > 0 and late >= SOLVED * highest


def _rises(metrics: Metrics, name: str) -> bool:
    """Return whether a metric rose from its third to its last quarter."""
    values = metrics.series(name).values
    count = len(values) // 4
    return count >= LEAST_STEPS // 4 and direction_of(values[-2 * count : -count], values[-count:]) > 0


# ---- the rules ------------------------------------------------------------------------------------------------------


def _no_learning_rate(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    if _learning_rate_is_zero(metrics):
        yield Advice(
            "The learning rate was 0 in every step, so the policy did not change. Set one above 0.",
            "model.optimizer.init_args.lr",
            "configuration.md",
        )


def _skipped_updates(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    if count := sum(metrics.series("policy/skipped_updates").values):
        yield Advice(
            f"{count:.0f} optimizer steps were skipped, because loss or gradient was not finite. Lower the learning "
            "rate; the batches are in the run folder, under nonfinite/.",
            "model.optimizer.init_args.lr",
            "the-step.md#when-something-is-wrong",
        )


def _failed_rewards(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    shares = metrics.series("reward/error_share").values
    if shares and fmean(shares) > REWARD_ERRORS:
        is_late = late_rewards(metrics)
        yield Advice(
            f"The reward of {fmean(shares):.0%} of the samples failed, and these trained nothing. "
            + ("Most missed the deadline: raise it. " if is_late else "")
            + "reward_errors.jsonl has each with its error.",
            "model.limits.reward_deadline_s" if is_late else "model.rewards",
            "rewards-and-data.md#deadlines-and-errors",
        )


def _equal_rewards(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    mean = late_mean(metrics, "reward/mean")
    if _never_differs(metrics) and mean is not None:
        yield Advice(
            f"Every completion of a step got the same reward ({mean:.3g} at the end), so nothing could be learned. "
            "Check in samples.jsonl that the reward function reads the completions as they are, and give partial "
            "rewards or easier prompts.",
            "model.rewards",
            "rewards-and-data.md#a-reward-of-your-own",
        )


def _truncated(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    share = late_mean(metrics, "completion/truncated_share")
    if share is not None and share > TRUNCATED:
        yield Advice(
            f"{share:.0%} of the completions were cut off at the longest length in the last quarter of the run. Raise "
            "it, or have the prompt or the reward ask for shorter ones.",
            "model.sampling.max_new_tokens",
            "configuration.md",
        )


def _flat_reward(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    quarters = quarters_of(metrics.series("reward/mean"))
    if quarters is None or _never_differs(metrics) or _learning_rate_is_zero(metrics) or _is_solved(metrics):
        return
    before, after = quarters
    change, means = direction_of(before, after), f"from {fmean(before):.3g} to {fmean(after):.3g}"
    if change < 0:
        yield Advice(
            f"The mean reward fell, {means} between the first and the last quarter of the run. Lower the learning "
            "rate.",
            "model.optimizer.init_args.lr",
            "configuration.md",
        )
    elif change == 0:
        yield Advice(
            f"The mean reward did not rise beyond its noise, {means} between the first and the last quarter of the "
            "run. Take more completions a prompt, easier prompts, or another learning rate.",
            "model.batch.group_size",
            "algorithms.md#which-one",
        )


def _groups_without_signal(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    degenerate, rejected = (
        late_mean(metrics, name) or 0.0 for name in ("advantages/degenerate_groups", "filter/rejected_groups")
    )
    if max(degenerate, rejected) <= NO_SIGNAL or _never_differs(metrics):
        return
    if _is_solved(metrics):
        yield Advice(
            f"All completions of {max(degenerate, rejected):.0%} of the prompts got the same reward in the last "
            "quarter of the run, most of them the highest: the policy has learned these prompts. Train on harder ones.",
            "data.train",
            "rewards-and-data.md#where-prompts-come-from",
        )
    elif rejected > NO_SIGNAL:
        yield Advice(
            f"{rejected:.0%} of the prompts were rejected in the last quarter of the run, and what was generated for "
            "them was lost. Leave out prompts that the policy always or never solves.",
            "data.train",
            "rewards-and-data.md#where-prompts-come-from",
        )
    else:
        yield Advice(
            f"All completions of {degenerate:.0%} of the prompts got the same reward in the last quarter of the run, "
            "and trained nothing. Take prompts that are neither always nor never solved, more completions of each, or "
            "DAPO, which draws others in their place.",
            "model.algorithm",
            "algorithms.md#dynamic-sampling",
        )


def _entropy(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    entropy = metrics.series("policy/entropy").values
    if len(entropy) < LEAST_ENTROPY_STEPS or _is_solved(metrics) or _rises(metrics, "reward/mean"):
        return
    first = fmean(entropy[:3])
    windows = [fmean(entropy[at : at + ENTROPY_STEPS]) for at in range(len(entropy) - ENTROPY_STEPS + 1)]
    lowest = min(windows)
    if first > 0 and lowest < (1 - ENTROPY_SPENT) * first:
        mean = late_mean(metrics, "reward/mean")
        reward = "" if mean is None else f", and the mean reward stands at {mean:.3g}"
        yield Advice(
            f"The policy's entropy fell from {first:.3g} to {lowest:.3g} nats per token{reward}: completions of a "
            "prompt are almost the same. Lower the learning rate, or raise clip_high or the entropy bonus.",
            "model.algorithm.init_args.entropy_coefficient",
            "algorithms.md#entropy-bonus",
        )


def _mismatch(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    quarters = quarters_of(metrics.series("mismatch/mean"))
    if quarters is None:
        return
    before, after = map(median, quarters)
    if after > MISMATCH_RISE * before and after > LEAST_MISMATCH:
        yield Advice(
            f"The mismatch of engine and trainer rose from {before:.2g} to {after:.2g} nats. Correct it by importance "
            "weights, and look for weights that do not arrive.",
            "model.algorithm.init_args.correction",
            "algorithms.md#importance-corrections",
        )


def _waiting(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    time = sum(metrics.series("time/step").values)
    waits, idle = (sum(metrics.series(f"partial/{name}").values) for name in ("wait_s", "engine_idle_s"))
    if time and waits > WAITING * time and waits >= idle:
        if (busy := late_mean(metrics, "rollout/api_cpu")) is not None and busy > API_BUSY:
            yield Advice(
                f"The trainer waited for groups in {waits / time:.0%} of the time, and a process that answers the "
                f"engine's requests used {busy:.0%} of a core. Let more of them answer (vLLM: api_server_count).",
                "model.rollout.init_args",
                "rollout-engines.md#on-gpus-of-its-own",
            )
            return
        yield Advice(
            f"The trainer waited for groups in {waits / time:.0%} of the time. Give the engine more GPUs, or allow "
            "older groups.",
            "model.partial_rollout.max_staleness",
            "asynchronous.md#which-side-waits",
        )
    elif time and idle > WAITING * time:
        yield Advice(
            f"The engine had nothing to generate in {idle / time:.0%} of the time. Give the trainer more of the GPUs.",
            "trainer.devices",
            "asynchronous.md#how-many-gpus-for-each-side",
        )


def _slow_prompts(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    time, reading = (sum(metrics.series(f"time/{name}").values) for name in ("step", "prompts"))
    if "data/num_read" in metrics.columns and time and reading > PROMPTS_SHARE * time:
        read, left_out = (max(metrics.series(f"data/num_{name}").values, default=0.0) for name in ("read", "too_long"))
        yield Advice(
            f"Reading prompts took {reading / time:.0%} of the time: {read:,.0f} rows, of which {left_out:,.0f} were "
            "too long. Read and tokenise the rows once, before the first step, unless memory cannot hold them.",
            "data.train.init_args.streaming",
            "rewards-and-data.md#streaming",
            "false",
        )


def _long_rollouts(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    steps, rollouts = (metrics.series(f"time/{name}").values for name in ("step", "rollout"))
    if not is_on_gpu(info) or len(steps) < LEAST_STEPS or metrics.series("partial/wait_s"):
        return
    if (share := sum(rollouts) / sum(steps)) > ROLLOUT_SHARE:
        yield Advice(
            f"The rollout took {share:.0%} of the time. Tune the engine, or give it GPUs of its own.",
            "model.rollout",
            "rollout-engines.md#tune-it",
        )


def _memory_left(metrics: Metrics, info: Mapping[str, Any]) -> Iterator[Advice]:
    peaks, total = metrics.series("memory/update").values, info.get("gpu_gib")
    if not is_on_gpu(info) or not peaks or not isinstance(total, int | float) or total <= 0:
        return
    if (peak := max(peaks)) < MEMORY_USED * total:
        yield Advice(
            f"The update took at most {peak:.1f} of {total:.0f} GiB of a GPU. Let a pass have more tokens, unless an "
            "engine in another process needs the rest.",
            "model.batch.max_tokens_per_gpu",
            "memory.md",
        )


RULES: Final[tuple[Callable[[Metrics, Mapping[str, Any]], Iterator[Advice]], ...]] = (
    _no_learning_rate,
    _skipped_updates,
    _failed_rewards,
    _entropy,
    _truncated,
    _equal_rewards,
    _flat_reward,
    _groups_without_signal,
    *REWARD_RULES,
    _mismatch,
    _waiting,
    _slow_prompts,
    *ENGINE_RULES,
    _long_rollouts,
    _memory_left,
    *IDLE_RULES,
)
"""From what makes a run useless to what makes it slow."""
RULES_OF_SHORT_RUNS: Final = RULES[:3]
"""Rules of what is wrong in a run of any length."""
