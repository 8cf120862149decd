"""Where the time of a run's steps went, and the options that shortened such phases where they were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from rlplug_watch.measures import Advice, is_on_gpu
from rlplug_watch.report.run_data import Metrics

LEAST_STEPS: Final = 4
"""Fewest steps of a run whose time is divided: the first quarter is left out, because it compiles and warms up."""
LEAST_GAIN: Final = 0.01
"""Least share of a step that is worth a sentence."""
MOST: Final = 2
"""Most levers that are named."""
RESHARD: Final = "trainer.strategy.init_args.reshard_after_forward"
LONG_TAIL: Final = 4.0
"""Times the mean length that the longest completion has, where the rest waits for it: 5.5 in the run measured."""


@dataclass(frozen=True)
class Facts:
    """What a run is known by."""

    metrics: Metrics
    info: Mapping[str, Any]
    """Contents of ``run.json``."""
    config: Mapping[str, str]
    """Values of ``config.yaml`` as text, by keys with dots."""

    @property
    def memory(self) -> float:
        """Largest share of a GPU's memory that the update took; 1 where that is not known."""
        total, peaks = self.info.get("gpu_gib"), self.metrics.series("memory/update").values
        return max(peaks) / total if peaks and isinstance(total, int | float) and total > 0 else 1.0

    def has(self, *classes: str) -> bool:
        """Return whether one of these optimizations is among the run's."""
        found = [value for key, value in self.config.items() if key.startswith("model.optimizations")]
        return any(value.rpartition(".")[2] in classes for value in found)


def _generates_with_transformers(run: Facts) -> bool:
    engine = run.config.get("model.rollout.class_path", run.config.get("model.rollout", ""))
    return engine.endswith("HFRollout") or (engine == "null" and not run.metrics.series("rollout/running"))


def _waits_for_the_longest(run: Facts) -> bool:
    longest, mean = (run.metrics.series(f"completion/length_{name}").values for name in ("max", "mean"))
    is_plain = run.config.get("model.partial_rollout") == "null"
    return is_plain and bool(mean) and max(longest) > LONG_TAIL * fmean(mean)


@dataclass(frozen=True)
class Lever:
    """An option that shortens a phase."""

    phase: str
    saved: float
    """Share of the phase's time that it saved where it was measured."""
    what: str
    measured: str
    """On what, and the folder of ``benchmarks/results`` that has it."""
    key: str
    page: str
    applies: Callable[[Facts], bool]


UPDATE: Final = "1.7B on an H200: 2026-11-21-update-on-h200"
CHECKPOINTING: Final = "optimizations.md#activations"
LEVERS: Final = (
    Lever(
        phase="rollout",
        saved=0.74,
        what="Generate with vLLM or SGLang rather than with transformers",
        measured="SmolLM2, 12 tokens, on an H200: 2026-11-27-engines-on-h200",
        key="model.rollout",
        page="rollout-engines.md",
        applies=_generates_with_transformers,
    ),
    Lever(
        phase="rollout",
        saved=0.4,
        what="Let the longest completions go on in the next step",
        measured="1.7B, 1,500 tokens and up to 8,192, on an H200: 2026-11-24-modes-on-h200",
        key="model.partial_rollout",
        page="environments.md#partial-rollout",
        applies=_waits_for_the_longest,
    ),
    Lever(
        phase="update",
        saved=0.27,
        what="Add CompileBlocks and FusedLogprobs",
        measured=UPDATE,
        key="model.optimizations",
        page="optimizations.md#where-to-begin",
        applies=lambda run: not run.has("CompileBlocks", "Liger"),
    ),
    Lever(
        phase="update",
        saved=0.24,
        what="Compute once what the completions of a group share",
        measured="1.7B, 256 + 512 tokens, on an H100: 2026-11-28-tree-kernels-on-h100",
        key="model.batch.share_prefixes",
        page="optimizations.md#shared-prefixes",
        applies=lambda run: run.config.get("model.batch.share_prefixes") == "false",
    ),
    Lever(
        phase="update",
        saved=0.19,
        what="Leave out GradientCheckpointing, if no engine needs the room",
        measured=UPDATE,
        key="model.optimizations",
        page=CHECKPOINTING,
        applies=lambda run: run.has("GradientCheckpointing") and run.memory < 0.45,
    ),
    Lever(
        phase="update",
        saved=0.11,
        what="Leave out SelectiveCheckpointing, if no engine needs the room",
        measured=UPDATE,
        key="model.optimizations",
        page=CHECKPOINTING,
        applies=lambda run: run.has("SelectiveCheckpointing") and run.memory < 0.75,
    ),
    Lever(
        phase="update",
        saved=0.03,
        what="Keep gathered weights (reshard_after_backward: false too), if no engine needs the room",
        measured=UPDATE,
        key=RESHARD,
        page="memory.md#gathering-and-reducing",
        applies=lambda run: run.config.get(RESHARD) == "true" and run.memory < 0.85,
    ),
)
"""What shortens a phase in most runs, as measured; a GPU has room by the peaks of the two runs compared."""


def shares_of(metrics: Metrics) -> dict[str, float]:
    """Return the share of the steps' time that each phase took, the largest first; nothing of a short run."""
    steps = metrics.series("time/step")
    if len(steps) < LEAST_STEPS:
        return {}
    begin, total = steps.steps[len(steps) // 4], sum(steps.values[len(steps) // 4 :])
    shares = {}
    for name in metrics.starting_with("time/"):
        series = metrics.series(name)
        seconds = sum(value for step, value in zip(series.steps, series.values, strict=True) if step >= begin)
        shares[name.removeprefix("time/")] = seconds / total if total > 0 else 0.0
    del shares["step"]
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def describe_shares(metrics: Metrics) -> str | None:
    """Return in words where the time went; ``None`` of a short run."""
    if not (shares := shares_of(metrics)):
        return None
    values = metrics.series("time/step").values
    late = values[len(values) // 4 :]
    parts = [f"{name} {share:.0%}" for name, share in shares.items() if share >= LEAST_GAIN]
    return f"a step took {fmean(late):.3g} s: {', '.join(parts)}"


def levers(metrics: Metrics, info: Mapping[str, Any], config: Mapping[str, str]) -> list[Advice]:
    """Return the options that should shorten a step most, at most ``MOST``, of a run on GPUs.

    Args:
        metrics: Metrics of the run.
        info: Contents of ``run.json``.
        config: Of :func:`~rlplug_watch.config_values.flat_config`; without it there are none.
    """
    run, shares = Facts(metrics, info, config), shares_of(metrics)
    if not is_on_gpu(info) or not config:
        return []
    gains = [(shares.get(lever.phase, 0.0) * lever.saved, lever) for lever in LEVERS if lever.applies(run)]
    largest = sorted((pair for pair in gains if pair[0] >= LEAST_GAIN), key=lambda pair: -pair[0])[:MOST]
    return [
        Advice(
            f"The {lever.phase} took {shares[lever.phase]:.0%} of a step. {lever.what}: that saved {lever.saved:.0%} "
            f"of it where it was measured ({lever.measured}), which is {gain:.0%} of a step here.",
            lever.key,
            lever.page,
        )
        for gain, lever in largest
    ]
