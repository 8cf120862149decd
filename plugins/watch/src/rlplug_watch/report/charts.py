"""Line charts of a report, and the metrics of a run that they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlplug_watch.report.figure import Section

FROM_ZERO: Final[Mapping[str, Any]] = {"rangemode": "tozero"}
SHARE: Final[Mapping[str, Any]] = {"rangemode": "tozero", "tickformat": "~%", "hoverformat": ".2~%"}


@dataclass(frozen=True)
class LineChart:
    """Description of a line chart."""

    section: Section
    title: str
    unit: str
    lines: tuple[tuple[str, str, str], ...]
    """Label, column and hue of each line."""
    note: str = ""
    axis: Mapping[str, Any] = field(default_factory=lambda: FROM_ZERO)
    may_be_log: bool = False


LINE_CHARTS: Final = (
    LineChart(
        "Learning",
        "Completion length",
        "tokens",
        (("mean", "completion/length_mean", "blue"), ("longest", "completion/length_max", "orange")),
    ),
    LineChart(
        "Learning",
        "Truncated and failed",
        "share of completions",
        (
            ("cut at max_new_tokens", "completion/truncated_share", "purple"),
            ("reward failed", "reward/error_share", "vermillion"),
        ),
        axis=SHARE,
    ),
    LineChart(
        "Stability",
        "Engine and trainer mismatch",
        "nats, absolute",
        (("mean", "mismatch/mean", "blue"), ("worst token", "mismatch/max", "orange")),
        note="Difference between the engine's and the trainer's logprobs of the sampled tokens.",
        may_be_log=True,
    ),
    LineChart("Stability", "KL to the reference policy", "nats per token, k3", (("KL", "policy/kl", "green"),)),
    LineChart("Stability", "Entropy", "nats per token", (("entropy", "policy/entropy", "purple"),)),
    LineChart("Stability", "Gradient norm", "", (("norm", "policy/grad_norm", "blue"),), may_be_log=True),
    LineChart(
        "Stability",
        "Clip fraction",
        "share of tokens",
        (
            ("too small a ratio", "policy/clip_fraction_low", "blue"),
            ("too large", "policy/clip_fraction_high", "orange"),
        ),
        axis=SHARE,
    ),
    LineChart(
        "Stability",
        "Groups without a signal",
        "share of prompts",
        (
            ("trained on", "advantages/degenerate_groups", "purple"),
            ("rejected", "filter/rejected_groups", "yellow"),
            ("missing after refills", "filter/missing_share", "vermillion"),
        ),
        note="All completions of such a prompt have the same reward: nothing to learn from comparing them.",
        axis=SHARE,
    ),
    LineChart(
        "Speed and memory",
        "Throughput",
        "tokens per second",
        (("tokens/s", "throughput/tokens_per_s", "green"),),
        axis={**FROM_ZERO, "tickformat": "~s", "hoverformat": ",.0f"},
    ),
)
"""Line charts of every run."""

OPTIONAL_CHARTS: Final = (
    LineChart(
        "Stability",
        "Ratio to the old policy",
        "largest and smallest of a step",
        (("largest", "policy/ratio_max", "orange"), ("smallest", "policy/ratio_min", "blue")),
        may_be_log=True,
    ),
    LineChart(
        "Learning",
        "Explained variance of the critic",
        "explained variance of its targets",
        (("explained variance", "critic/explained_variance", "green"),),
        note="1 is a perfect critic; 0 is no better than a constant, and below 0 is worse than one.",
        axis={"range": [-1, 1.05]},
    ),
    LineChart(
        "Learning",
        "Turns of a trajectory",
        "",
        (("mean", "turns/mean", "blue"), ("most", "turns/max", "orange")),
        axis=FROM_ZERO,
    ),
    LineChart(
        "Stability",
        "Age of the tokens that train",
        "in versions of the policy, with a partial rollout",
        (("mean", "partial/age_mean", "blue"), ("oldest", "partial/age_max", "orange")),
        axis=FROM_ZERO,
    ),
    LineChart(
        "Stability",
        "Staleness of the groups that train",
        "in versions of the policy, with a bound",
        (("mean", "partial/staleness_mean", "blue"), ("largest", "partial/staleness_max", "orange")),
        axis=FROM_ZERO,
    ),
    LineChart(
        "Speed and memory",
        "GPUs at work",
        "share",
        (
            ("busy, mean of ranks", "gpu/busy_share", "blue"),
            ("busy, lowest rank", "gpu/busy_share_min", "orange"),
            ("MFU of the update", "throughput/mfu", "green"),
        ),
        note="Busy: some kernel ran, a collective that waits included. MFU: FLOPs over the GPUs' peak in bfloat16.",
        axis=SHARE,
    ),
    LineChart(
        "Speed and memory",
        "Memory of the whole GPU",
        "GiB, of all processes on the fullest rank's",
        (("peak of a step", "gpu/memory_gib", "purple"),),
    ),
    LineChart(
        "Speed and memory",
        "What requests waited for",
        "share of the rollout's time",
        (
            ("slots", "rollout/waits_for_slots", "blue"),
            ("KV cache", "rollout/waits_for_cache", "vermillion"),
            ("prefill", "rollout/waits_for_prefill", "green"),
        ),
        axis=SHARE,
    ),
    LineChart(
        "Speed and memory",
        "Which side waits",
        "seconds per step, in an asynchronous run",
        (("trainer, for groups", "partial/wait_s", "blue"), ("engine, idle", "partial/engine_idle_s", "orange")),
        axis=FROM_ZERO,
    ),
    LineChart(
        "Speed and memory",
        "Groups that go on in the next step",
        "",
        (("open", "partial/groups_in_flight", "blue"), ("complete", "partial/groups_complete", "green")),
        axis=FROM_ZERO,
    ),
    LineChart("Stability", "Loss of the critic", "", (("loss", "critic/loss", "green"),), may_be_log=True),
)
"""Line charts of the runs that recorded them; they are not named as absent in others."""
