"""Terminal output of a run: its plans, samples of a validation, how it ended and what to do next."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplug.distributed.checkpoint import newest_checkpoint
from rlplug.interfaces.memory import PLAN_PHASES
from rlplug.observability.terminal import invocation, make_table, say, show

if TYPE_CHECKING:
    from rlplug.interfaces.memory_plan import MemoryDecisions
    from rlplug.types import Sample


def print_start(module: Any, counts: Mapping[str, Mapping[str, int]], run_dir: Path) -> None:
    """Print the batch plan, the memory plan, what took effect, and the run's folder."""
    total = module.plan.total_steps
    rows = module.plan.batch.table_rows(module.config.on_policy_pass)
    print_batch_plan(rows, f"batch plan, {total} step{'s' * (total > 1)}")
    if module.plan.memory is not None:
        print_memory_plan(module.plan.memory)
    for split, count in counts.items():
        if count["too_long"]:
            say(
                f"data.{split}: {count['too_long']} of {count['read']} prompts were left out, because they are too long"
            )
    for effect in module.models.effects:
        say(f"took effect: {effect.description}", wraps=True)
    say(f"run folder: {run_dir}")


def print_batch_plan(rows: Sequence[tuple[str, str, str]], title: str) -> None:
    """Print the rows of a batch plan as a table."""
    show(make_table(("size", "value", "meaning"), rows, title))


def print_memory_plan(memory: MemoryDecisions) -> None:
    """Print a memory plan as a table, and below it what was decided and is recommended."""
    show(make_table(("item", *PLAN_PHASES), memory.rows, memory.title, num_totals=2))
    for note in memory.notes:
        say(note)


def print_samples(samples: Sequence[Sample], step: int) -> None:
    """Print prompts, completions and rewards of a validation."""
    rows = [
        (
            "error" if sample.errors else f"{sample.reward:.2f}",
            sample.prompt.text[-80:],
            sample.completion[:200],
            str(sample.prompt.answer)[:80],
        )
        for sample in samples
    ]
    show(make_table(("reward", "prompt", "completion", "answer"), rows, f"validation, step {step}"))


def print_validation(metrics: Mapping[str, Any], run_dir: Path) -> None:
    """Print the metrics of a validation."""
    rows = [(name, f"{float(value):.4g}") for name, value in metrics.items()]
    show(make_table(("metric", "value"), rows, f"validation, run folder {run_dir}"))


def print_interrupted(module: Any, run_dir: Path) -> None:
    """Say where a run that was told to stop was saved, and how to go on."""
    say(
        f"\nStopped after step {module.rollout_step} of {module.plan.total_steps}; saved as "
        f"{newest_checkpoint(run_dir)}.\nGo on with: {invocation()} fit --resume {shlex.quote(str(run_dir))}"
    )


def print_summary(run_dir: Path, rows: Sequence[Mapping[str, Any]], seconds: float, lines: Sequence[str]) -> None:
    """Print the rewards, where the results are, what observers found, and what to do next.

    Args:
        run_dir: Folder of the run.
        rows: Metrics of each step by name, and the step as ``step``.
        seconds: Duration of the run.
        lines: What was written, and what observers of the run say.
    """
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if rewards:
        last, steps = rewards[-5:], f"{len(rewards)} step{'s' * (len(rewards) > 1)}"
        end = f"{statistics.fmean(last):.3f} (last {len(last)} of {steps})"
        say(f"\nmean reward {rewards[0]:.3f} -> {end}, {seconds:.0f} s")
    for line in lines:
        say(line, wraps=True)
    more = 2 * max((row["step"] for row in rows), default=1)
    say("next: load the policy with AutoModelForCausalLM.from_pretrained, or train longer:", wraps=True)
    say(f"  {invocation()} fit --resume {shlex.quote(str(run_dir))} --model.num_steps {more}")
