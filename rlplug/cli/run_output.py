"""Terminal output of a run: its plans, samples of a validation, how it ended and what to do next."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlplug.distributed.checkpoint import newest_checkpoint
from rlplug.observability.metrics_csv import MetricsCSV
from rlplug.training.memory_plan.table import memory_notes, memory_table
from rlplug.types import Sample


def print_start(console: Console, module: Any, num_filtered: Mapping[str, int], run_dir: Path) -> None:
    """Print the batch plan, the memory plan, what took effect, and the run's folder."""
    total = module.plan.total_steps
    rows = module.plan.batch.table_rows(module.config.on_policy_pass)
    console.print(batch_table(rows, f"batch plan, {total} step{'s' * (total > 1)}"))
    memory = module.plan.memory
    if memory is not None:
        console.print(memory_table(memory.plan))
        for note in memory_notes(memory):
            console.print(note, highlight=False)
    for split, count in num_filtered.items():
        if count:
            console.print(f"data.{split}: {count} prompts were left out, because they are too long")
    for effect in module.models.effects:
        console.print(f"took effect: {effect.description}")
    console.print(f"run folder: {run_dir}")


def batch_table(rows: Sequence[tuple[str, str, str]], title: str) -> Table:
    """Return the rows of a batch plan as a table."""
    table = Table("size", "value", "meaning", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def print_samples(console: Console, samples: Sequence[Sample], step: int) -> None:
    """Print prompts, completions and rewards of a validation."""
    table = Table("reward", "prompt", "completion", "answer", title=f"validation, step {step}", title_justify="left")
    for sample in samples:
        reward = "error" if sample.errors else f"{sample.reward:.2f}"
        table.add_row(reward, sample.prompt.text[-80:], sample.completion[:200], str(sample.prompt.answer)[:80])
    console.print(table)


def print_validation(console: Console, metrics: Mapping[str, Any], run_dir: Path) -> None:
    """Print the metrics of a validation."""
    table = Table("metric", "value", title=f"validation, run folder {run_dir}", title_justify="left")
    for name, value in metrics.items():
        table.add_row(name, f"{float(value):.4g}")
    console.print(table)


def print_interrupted(console: Console, module: Any, run_dir: Path) -> None:
    """Say where a run that was told to stop was saved, and how to go on."""
    console.print(
        f"\nStopped after step {module.rollout_step} of {module.plan.total_steps}; saved as "
        f"{newest_checkpoint(run_dir)}.\nGo on with: rlplug fit --resume {run_dir}"
    )


def print_summary(console: Console, run_dir: Path, metrics: MetricsCSV, seconds: float, results: Sequence[str]) -> None:
    """Print the rewards, where the results are, and what to do next.

    Args:
        metrics: Of all steps.
        seconds: Duration of the run.
        results: A line for each result that was written, or that was not.
    """
    rewards = [float(row["reward/mean"]) for row in metrics.read() if row.get("reward/mean")]
    if rewards:
        last = statistics.fmean(rewards[-5:])
        console.print(f"\nmean reward {rewards[0]:.3f} -> {last:.3f} (last 5 of {len(rewards)} steps), {seconds:.0f} s")
    for line in results:
        console.print(line, soft_wrap=True)
    console.print(
        "next: open the report; load the policy with AutoModelForCausalLM.from_pretrained; change a key and run "
        f"again, such as --model.batch.group_size 16; train longer with rlplug fit --resume {run_dir} "
        "--model.num_steps MORE",
        soft_wrap=True,
    )
