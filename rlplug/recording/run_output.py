"""Terminal output of a run: its plans, samples of a validation, how it ended and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplug.observability.outcome import held_out_reward, training_reward
from rlplug.observability.terminal import invocation, make_table, say, show

if TYPE_CHECKING:
    from rlplug.interfaces.memory_plan import MemoryDecisions
    from rlplug.types import Prompt, Sample


def print_start(module: Any, counts: Mapping[str, Mapping[str, int]], run_dir: Path, is_verbose: bool) -> None:
    """Print what trains on what, with which engine and rewards, what took effect, and the run's folder.

    Args:
        module: The run's ``RLModule``.
        counts: Numbers of prompts that were read, too long, and kept, by the split.
        run_dir: Folder of the run.
        is_verbose: Whether to print the batch plan and the memory plan too.
    """
    config, plan, device = module.config, module.plan, module.strategy.root_device
    sizes = f"{plan.batch.prompts_per_step} prompts x {plan.batch.group_size} completions"
    where = f"{device.type}" + f" x {plan.mesh.world_size}" * (plan.mesh.world_size > 1)
    what = f"{config.policy.path} ({config.policy.dtype}{', adapters alone' * (config.lora is not None)})"
    steps = f"{plan.total_steps} step{'s' * (plan.total_steps > 1)}"
    say(f"{type(config.algorithm).__name__} trains {what} on {where}: {steps} of {sizes}", wraps=True)
    prompts = ", ".join(f"{count['kept']:,} prompts of data.{split}" for split, count in counts.items())
    rewards = ", ".join(module.rewards.names) or "nothing"
    say(f"{type(config.engine).__name__} generates, {rewards} scores; {prompts}", wraps=True)
    if is_verbose:
        print_batch_plan(plan.batch.table_rows(config.on_policy_pass), f"batch plan, {steps}")
    if plan.memory is not None:
        print_memory_plan(plan.memory, is_verbose)
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


def print_memory_plan(memory: MemoryDecisions, has_table: bool = True) -> None:
    """Print a memory plan as a table, and below it what was decided and is recommended."""
    if has_table:
        from rlplug.interfaces.memory import PLAN_PHASES

        show(make_table(("item", *PLAN_PHASES), memory.rows, memory.title, num_totals=2))
    for note in memory.notes:
        say(note)


def print_samples(samples: Sequence[Sample], step: int) -> None:
    """Print prompts, completions and rewards of a validation."""
    rows = [
        (
            "error" if sample.errors else f"{sample.reward:.2f}",
            _start_of(_question(sample.prompt)[::-1], 80)[::-1],  # its end, where the question is
            _start_of(sample.transcript, 200),
            _start_of(str(sample.prompt.answer), 80),
        )
        for sample in samples
    ]
    show(make_table(("reward", "prompt", "completion", "answer"), rows, f"validation, step {step}"))


def _question(prompt: Prompt) -> str:
    """Return the last message of the user, or a plain prompt."""
    return next((each["content"] for each in reversed(prompt.messages) if each["role"] == "user"), prompt.text)


def _start_of(text: str, longest: int) -> str:
    """Return the whole words of up to ``longest`` characters at the start; a long word is cut."""
    found = re.match(rf".{{{longest // 2},{longest}}}(?=\s)", text, re.DOTALL)
    return text if len(text) <= longest else f"{found[0] if found else text[:longest]} …"


def print_validation(metrics: Mapping[str, Any], run_dir: Path) -> None:
    """Print the metrics of a validation."""
    rows = [(name, f"{float(value):.4g}") for name, value in metrics.items()]
    show(make_table(("metric", "value"), rows, f"validation, run folder {run_dir}"))


def print_interrupted(module: Any, run_dir: Path) -> None:
    """Say where a run that was told to stop was saved, and how to go on."""
    from rlplug.distributed.checkpoints.reader import newest_checkpoint

    say(
        f"\nStopped after step {module.rollout_step} of {module.plan.total_steps}; saved as "
        f"{newest_checkpoint(run_dir)}.\nGo on with: {invocation()} fit --resume {shlex.quote(str(run_dir))}"
    )


def print_summary(
    run_dir: Path, rows: Sequence[Mapping[str, Any]], seconds: float, lines: Sequence[str], can_resume: bool
) -> None:
    """Print rewards, where the results are, what observers found, what to do next, and whether the policy learned.

    Args:
        run_dir: Folder of the run.
        rows: Metrics of each step by name, and the step as ``step``.
        seconds: Duration of the run.
        lines: What was written, and what observers of the run say.
        can_resume: Whether the command line can go on with the run: one from Python has no configuration file.
    """
    if (trained := training_reward(rows)) is not None:
        ends, total = f"{trained.before:.3f} -> {trained.after:.3f}", sum("reward/mean" in row for row in rows)
        say(f"\ntraining reward {ends} (means of {trained.num_steps} of {total} steps each), {seconds:.0f} s")
    for line in lines:
        say(line, wraps=True)
    if can_resume:
        more = 2 * max((row["step"] for row in rows), default=1)
        load = "load the policy with AutoModelForCausalLM.from_pretrained, or " * (run_dir / "policy").is_dir()
        say(f"next: {load}train longer:", wraps=True)
        say(f"  {invocation()} fit --resume {shlex.quote(str(run_dir))} --num_steps {more}")
    if (held_out := held_out_reward(rows)) is not None:
        before, after = held_out.intervals or (None, None)
        shown = f"{_with_interval(held_out.before, before)} -> {_with_interval(held_out.after, after)}"
        say(f"held-out reward {shown}" + (f": {held_out.verdict}" if held_out.verdict else ""))


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:.3f}" + ("" if interval is None else " ({:.3f} to {:.3f})".format(*interval))
