"""Metrics of a rollout, under the names that loggers and the report use."""

from __future__ import annotations

import statistics

from rlplug.types import ENVIRONMENT, RewardError, Rollout


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Summarise all scored samples of a step, selected or not.

    Returns:
        Rewards, with failed ones left out and counted; lengths in tokens; how completions ended; the share of samples
        that train; the share of groups that the algorithm rejected, of those that it saw; turns, with an environment.
    """
    samples = rollout.drawn
    num_seen = len({sample.group for sample in rollout.samples + rollout.rejected})
    lengths = [sample.num_response_tokens for sample in samples]
    scored = [sample.reward for sample in samples if not sample.errors]
    metrics = {
        "reward/error_share": 1 - len(scored) / len(samples),
        "completion/num_tokens": float(sum(lengths)),
        "completion/length_mean": statistics.fmean(lengths),
        "completion/length_max": float(max(lengths)),
        "completion/truncated_share": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "filter/kept_share": len(rollout.samples) / len(samples),
        "filter/rejected_groups": 1 - rollout.num_groups / num_seen,
    }
    if scored:
        metrics["reward/mean"] = statistics.fmean(scored)
        metrics["reward/std"] = statistics.pstdev(scored)
        metrics["reward/min"], metrics["reward/max"] = min(scored), max(scored)
    if ENVIRONMENT in samples[0].rewards:
        turns = [sample.num_turns for sample in samples]
        metrics |= {"turns/mean": statistics.fmean(turns), "turns/max": float(max(turns))}
    for name in samples[0].rewards:
        values = [value for s in samples if not isinstance(value := s.rewards[name], RewardError)]
        if values:
            metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics
