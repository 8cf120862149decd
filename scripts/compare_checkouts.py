"""Shows whether a refactoring changes a run's numbers: the same seeded runs from two checkouts, compared bit for bit.

    python scripts/compare_checkouts.py record ../before runs/compare/before
    python scripts/compare_checkouts.py record . runs/compare/after
    python scripts/compare_checkouts.py compare runs/compare/before runs/compare/after

``record`` carries out ``RUNS`` on the CPU, with the interpreter of the checkout's own ``.venv`` unless ``--python``
names another, and keeps run folders and logs. ``compare`` needs the two folders alone: one side can be recorded before
the work starts. It exits with 1 where the sides differ. Each run is told by files of its own checkout and by keys of
the command line; where a key was renamed, ``--also`` gives a side its own name for it.

Compared are the metrics of ``metrics.jsonl``, ``samples.jsonl``, and every tensor of the exported policy. Left out are
the metrics whose value depends on the clock or on the machine's memory, as ``LEFT_OUT`` lists them: ``compare`` prints
which those were. Everything else must be there on both sides and be equal to the last digit.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

QUICKSTART = ("--config", "configs/quickstart.yaml")
GAME = ("--config", "configs/hidden_digit.yaml")
SMALL_BATCH = (
    *("--model.batch.prompts_per_step", "16", "--model.batch.group_size", "4"),
    *("--model.batch.mini_batch_size", "32", "--model.batch.num_epochs", "2"),
)
"""64 completions in two mini-batches, seen twice: four optimizer steps for each rollout."""
CRITIC = ("--model.critic", "{optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.001}}}")
PPO = ("--config", "configs/algo/ppo.yaml", *CRITIC)

LEFT_OUT = {
    r"time/.*": "seconds of a phase",
    r".*(^|[/_])seconds(_.*)?": "seconds of anything else: sync, sleep, wake, offload, environments",
    r".*_per_s": "throughput",
    r"partial/(wait|overlap|engine_idle)_s": "seconds of one side of a run whose engine streams",
    r"memory/.*|.*freed_gib": "bytes that the process held",
}
"""Metrics that two equal runs do not share, as regular expressions of the whole name."""

KILL_IN_UPDATE = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
left = int(os.environ.pop("KILL_AT_OPTIMIZER_STEP"))
def count(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
register_optimizer_step_pre_hook(count)
runpy.run_module("rlplug", run_name="__main__", alter_sys=True)
"""
"""Starts the command line in a process that kills itself before its n-th optimizer step."""


@dataclass(frozen=True)
class Run:
    """One seeded run.

    Args:
        arguments: Of ``rlplug fit``, without the run folder.
        num_steps: Rollout steps.
        kill_at: Optimizer step before which the process gets SIGKILL; the run is then resumed.
        needs: File of the checkout without which the run is left out.
    """

    arguments: tuple[str, ...]
    num_steps: int
    kill_at: int | None = None
    needs: str | None = None


RUNS = {
    "quickstart": Run(QUICKSTART, 160),
    "ppo": Run((*QUICKSTART, *PPO, *SMALL_BATCH, "--model.batch.max_tokens_per_gpu", "96"), 25),
    "dapo": Run((*QUICKSTART, "--config", "configs/algo/dapo.yaml"), 25),
    "turns": Run(GAME, 15),
    "partial-rollout": Run(
        (
            *(*GAME, "--model.batch.prompts_per_step", "8", "--model.batch.group_size", "4"),
            *("--model.partial_rollout", "{max_tokens_per_step: 2, groups_in_flight: 12}"),
            *("--model.algorithm.correction", "{}", "--model.algorithm.kl_coefficient", "0.05"),
        ),
        25,
    ),
    "pretrained": Run(("--config", "configs/smollm2.yaml"), 2, needs="models/SmolLM2-135M-Instruct/config.json"),
    "fp8": Run((*QUICKSTART, "--config", "configs/weight_sync/fp8_block.yaml", *SMALL_BATCH), 25),
    "optimizations": Run(
        (
            *(*QUICKSTART, "--config", "configs/optim/muon.yaml", "--model.optimizer.init_args.lr", "0.0005"),
            *("--model.optimizations", "[{class_path: GradientCheckpointing}, {class_path: FusedLogprobs}]"),
        ),
        15,
    ),
    "two-ranks": Run(
        (
            *(*QUICKSTART, *SMALL_BATCH, "--trainer.devices", "2", "--model.algorithm.kl_coefficient", "0.05"),
            *("--model.batch.micro_batch_size_per_gpu", "3"),
        ),
        25,
    ),
    "two-ranks-shared-critic": Run(
        (
            *(*QUICKSTART, *SMALL_BATCH, "--trainer.devices", "2", "--model.algorithm", "PPO"),
            *("--model.critic", "{share_trunk: true}", "--model.algorithm.kl_in", "loss"),
        ),
        15,
    ),
    "killed-and-resumed": Run(
        (*QUICKSTART, *PPO, *SMALL_BATCH, "--checkpoint.every_n_steps", "4"),
        12,
        kill_at=4 * 2 * 10 + 5,  # policy and critic step four times a rollout each: in the eleventh, after step 8
    ),
    "asynchronous": Run(
        (
            *(*QUICKSTART, "--model.batch.prompts_per_step", "4", "--model.batch.group_size", "4"),
            *("--model.batch.mini_batch_size", "16", "--model.rollout", "streaming_parts.OneGroupLater"),
            *("--model.partial_rollout", "{asynchronous: true, max_staleness: 0}"),
        ),
        6,
    ),
    "lora": Run((*QUICKSTART, *SMALL_BATCH, "--model.lora", "{rank: 4, alpha: 8}"), 15),
    "torchtitan": Run((*QUICKSTART, *SMALL_BATCH, "--model.trainer", "TorchTitan"), 15),
}


def carry_out(name: str, run: Run, checkout: Path, python: Path, folder: Path, also: Sequence[str]) -> None:
    """Carry out a run and, where it kills itself, resume it; its folder is then ``folder/name/001``."""
    plain = [str(python), "-m", "rlplug"]
    steps = ("--model.num_steps", str(run.num_steps), "--run.report", "false", "--run.dir", str(folder / name))
    fit = ["fit", *run.arguments, *also, *steps]
    parts = [
        checkout / "tests/integration",
        *checkout.glob("**/plugins/devkit/tests"),
        *checkout.glob("plugins/*/tests"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, parts))  # engines of the tests
    commands = [([*plain, *fit], 0)]
    if run.kill_at is not None:
        environment["KILL_AT_OPTIMIZER_STEP"] = str(run.kill_at)
        resume = ["fit", "--resume", str(folder / name / "001")]
        commands = [([str(python), "-c", KILL_IN_UPDATE, *fit], -9), ([*plain, *resume], 0)]
    log = folder / f"{name}.log"
    for command, expected in commands:
        with log.open("a") as file:
            code = subprocess.run(command, cwd=checkout, env=environment, stdout=file, stderr=file).returncode
        if code != expected:
            sys.exit(f"{name} ended with {code}, not {expected}. The end of {log}:\n{log.read_text()[-3000:]}")


def record(options: argparse.Namespace) -> int:
    """Carry out the runs of a checkout, and write where they come from."""
    checkout = options.checkout.resolve()
    python = options.python or checkout / ".venv/bin/python"
    about = what_is_run(checkout, python)
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    finished = read_record(folder)
    for name, run in ((name, RUNS[name]) for name in options.only or RUNS):
        finished.pop(name, None)
        write_record(folder, finished)
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / f"{name}.log").unlink(missing_ok=True)
        if run.needs is not None and not (checkout / run.needs).exists():
            print(f"{name}: left out, {checkout / run.needs} is missing", flush=True)
            continue
        if name == "quickstart" and options.quickstart_steps:
            run = Run(run.arguments, options.quickstart_steps)
        began = time.perf_counter()
        carry_out(name, run, checkout, python, folder, options.also)
        print(f"{name}: {run.num_steps} steps, {time.perf_counter() - began:.0f} s", flush=True)
        finished[name] = about
        write_record(folder, finished)
    return 0


def read_record(folder: Path) -> dict[str, dict[str, Any]]:
    """Return where each finished run in ``folder`` comes from."""
    file = folder / "record.json"
    record: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    return record


def write_record(folder: Path, finished: dict[str, dict[str, Any]]) -> None:
    (folder / "record.json").write_text(json.dumps(finished, indent=2) + "\n")


def what_is_run(checkout: Path, python: Path) -> dict[str, Any]:
    """Return commit and versions; refuse an interpreter that imports another checkout's packages."""
    code = (
        "import json\n"
        "from importlib.metadata import entry_points, version\n"
        "from importlib.util import find_spec\n"
        "plugins = {e.module.partition('.')[0] for e in entry_points(group='rlplug.plugins')}\n"
        "print(json.dumps({'files': [find_spec(name).origin for name in ('rlplug', *sorted(plugins))],\n"
        "  'versions': {name: version(name) for name in ('torch', 'transformers', 'lightning')}}))"
    )
    done = subprocess.run([python, "-c", code], cwd=checkout, capture_output=True, text=True, check=True)
    about: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if foreign := [file for file in about.pop("files") if not Path(file).is_relative_to(checkout)]:
        sys.exit(f"{python} imports {foreign}, not the files of {checkout}: name its own interpreter")
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {"commit": commit, "changed files": changed, **about}


def is_left_out(column: str) -> bool:
    """Return whether a metric may differ between two equal runs."""
    return any(re.fullmatch(pattern, column) for pattern in LEFT_OUT)


def read_metrics(run: Path) -> list[dict[str, str]]:
    """Return the metrics of each step of a run, as text that is the same for equal numbers and for NaN.

    A side whose checkout is older than ``metrics.jsonl`` has a ``metrics.csv``.
    """
    if (run / "metrics.csv").exists():
        with (run / "metrics.csv").open(newline="") as file:
            lines = [{name: cell for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    else:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps: dict[int, dict[str, str]] = {}
    for line in lines:
        steps.setdefault(int(line["step"]), {}).update({name: repr(float(value)) for name, value in line.items()})
    return [steps[step] for step in sorted(steps)]


def differing_metrics(before: list[dict[str, str]], after: list[dict[str, str]]) -> Iterator[str]:
    """Yield what differs in the metrics that are compared."""
    if len(before) != len(after):
        yield f"{len(before)} steps in the metrics and {len(after)}"
    columns = [{name for row in rows for name in row if not is_left_out(name)} for rows in (before, after)]
    if only := columns[0] - columns[1]:
        yield f"only before: {', '.join(sorted(only))}"
    if only := columns[1] - columns[0]:
        yield f"only after: {', '.join(sorted(only))}"
    for name in sorted(columns[0] & columns[1]):
        for number, (old, new) in enumerate(zip(before, after, strict=False), start=1):
            if old.get(name) != new.get(name):
                yield f"{name}, first in row {number}: {old.get(name)} and {new.get(name)}"
                break


def read_weights(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the exported policy."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((run / "policy").glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def differing_weights(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Iterator[str]:
    """Yield what differs in names, dtypes, shapes or bits."""
    if not before:
        yield "no weights were exported"
    if missing := before.keys() ^ after.keys():
        yield f"weights on one side only: {', '.join(sorted(missing))}"
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        if old.dtype != new.dtype or old.shape != new.shape:
            yield f"{name}: {old.dtype} {tuple(old.shape)} and {new.dtype} {tuple(new.shape)}"
        elif not torch.equal(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8)):
            yield f"{name}: {int((old != new).sum())} of {old.numel()} elements differ in value, others in bits alone"


def describe(about: dict[str, Any]) -> str:
    """Return commit, uncommitted changes and versions of a recorded run."""
    changed = f" with {len(about['changed files'])} changed files" if about["changed files"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"{about['commit']}{changed}, {versions}"


def compare(options: argparse.Namespace) -> int:
    """Print a table with a row for each run; return 1 where anything differs or a side lacks a run."""
    recorded = [read_record(folder) for folder in (options.before, options.after)]
    for side, record_of_side in zip(("before", "after"), recorded, strict=True):
        for about in dict.fromkeys(map(describe, record_of_side.values())):
            print(f"{side}: {about}")
    left_out: set[str] = set()
    problems: dict[str, list[str]] = {}
    lines = ["| run | rows | with a gradient | columns compared | samples | weights | |", "|-|-|-|-|-|-|-|"]
    for name in options.only or [name for name in RUNS if any(name in side for side in recorded)]:
        if not all(name in names for names in recorded):
            problems[name] = ["recorded on one side only" if any(name in names for names in recorded) else "no record"]
            lines.append(f"| {name} | | | | | | {problems[name][0]} |")
            continue
        runs = [folder / name / "001" for folder in (options.before, options.after)]
        metrics, weights = [read_metrics(run) for run in runs], [read_weights(run) for run in runs]
        samples = [(run / "samples.jsonl").read_text() for run in runs]
        found = [*differing_metrics(*metrics), *differing_weights(*weights)]
        found += ["samples.jsonl differs"] if samples[0] != samples[1] else []
        num_trained = sum(float(row.get("policy/grad_norm", 0)) > 0 for row in metrics[0])
        found += [] if num_trained else ["no step had a gradient, so that equal weights show nothing"]
        columns = {column for row in metrics[0] for column in row}
        left_out |= {column for column in columns if is_left_out(column)}
        num_compared = sum(not is_left_out(column) for column in columns)
        sizes = [len(metrics[0]), num_trained, num_compared, len(samples[0].splitlines()), len(weights[0])]
        verdict = f"**{len(found)} differences**" if found else "equal"
        lines.append(f"| {name} | {' | '.join(map(str, sizes))} | {verdict} |")
        problems |= {name: found} if found else {}
    print(f"columns left out: {', '.join(sorted(left_out))}\n\n" + "\n".join(lines))
    for name, found in problems.items():
        print(f"\n{name}:\n" + "\n".join(f"  {line}" for line in found[:40]))
    return 1 if problems or len(lines) == 2 else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="carry out the runs of a checkout")
    recording.add_argument("checkout", type=Path)
    recording.add_argument("folder", type=Path, help="for run folders and logs; what is there of a run is replaced")
    recording.add_argument("--python", type=Path, help="interpreter; default: CHECKOUT/.venv/bin/python")
    recording.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN", help=", ".join(RUNS))
    recording.add_argument("--quickstart-steps", type=int, help="fewer than its 160")
    recording.add_argument("--also", nargs=argparse.REMAINDER, default=[], help="last: further options of every run")
    recording.set_defaults(command=record)
    comparing = commands.add_parser("compare", help="compare two recorded folders")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--only", nargs="+", choices=RUNS, metavar="RUN")
    comparing.set_defaults(command=compare)
    options = parser.parse_args()
    return int(options.command(options))


if __name__ == "__main__":
    sys.exit(main())
