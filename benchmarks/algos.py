"""Every algorithm on the quickstart's task: steps to a threshold, time, final reward, what its critic explains.

``python benchmarks/algos.py --out OUT`` needs two CPU cores and about ten minutes per seed. All runs share the
quickstart's policy, prompts, sampling, learning rate and number of steps; ``OPTIONS`` is all that differs. ``OUT`` gets
``table.md``, ``curves.csv`` (mean reward per step) and ``curves.png``. A run that ``OUT`` has from before is read, and
not run again: give other options an ``OUT`` of their own.

``--task credit`` trains PPO alone, with its critic and with a broken one, on a task that needs it: see
``benchmarks/credit.py``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import credit

from rlplug.observability.metrics_log import read_metrics

ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 4e-4, "weight_decay": 0.0, "betas": [0.9, 0.95]}}
OPTIONS: dict[str, dict[str, object]] = {
    "GRPO": {},
    "DrGRPO": {},
    "DAPO": {"max_refills": 4, "over_sampling": 1.5, "overlong_filter": True},
    "RLOO": {},
    "ReinforcePP": {},
    "ReinforcePPBaseline": {},
    "GSPO": {},
    "CISPO": {},
    "PPO": {"gae_lambda": 0.8},
    "VAPO": {"alpha": 1.0},  # the paper's 0.05 is for thousands of tokens: with four, lambda would be 0
    "PFPPO": {"gae_lambda": 0.8},
}
"""``init_args`` of each. The policy starts from random weights: no KL penalty holds a run near those."""

WITH_CRITIC = ("PPO", "VAPO", "PFPPO")
SHARED_TRUNK = "PPO, shared trunk"
WINDOW = 5
"""Steps that rewards are averaged over, against the noise of a single one."""


def sort_runs(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the arguments of each algorithm on the quickstart's own task."""
    own_trunk = {"num_epochs": options.critic_epochs, "optimizer": ADAMW}
    runs = {}
    for name in options.only or [*OPTIONS, SHARED_TRUNK]:
        class_path = name.partition(",")[0]
        runs[name] = ["--model.algorithm", json.dumps({"class_path": class_path, "init_args": OPTIONS[class_path]})]
        runs[name] += ["--model.batch.prompts_per_step", str(options.prompts)]
        if class_path in WITH_CRITIC:
            critic = {"share_trunk": True, "optimizer": ADAMW} if name == SHARED_TRUNK else own_trunk
            runs[name] += ["--model.critic", json.dumps(critic)]
    return runs


@dataclass
class Curve:
    """One run."""

    algorithm: str
    seed: int
    rows: list[dict[str, float]]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    @property
    def rewards(self) -> list[float]:
        return self.column("reward/mean")

    @property
    def final(self) -> float:
        """Mean reward of the last window."""
        return statistics.fmean(self.rewards[-WINDOW:])

    def steps_to(self, threshold: float) -> int | None:
        """Return the first step whose window's mean reward reaches the threshold."""
        for step in range(WINDOW, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[step - WINDOW : step]) >= threshold:
                return step
        return None


def train(algorithm: str, seed: int, num_steps: int, arguments: list[str], out: Path) -> Curve:
    """Run one algorithm, unless ``out`` has its run already, and return its curve."""
    if not (out / "001" / "policy").exists():
        command = [
            *("fit", "--config", "configs/quickstart.yaml", "--run.report", "false", "--run.dir", str(out)),
            *("--model.num_steps", str(num_steps), "--model.seed", str(seed), "--model.policy.seed", str(seed)),
            *("--checkpoint.every_n_steps", str(num_steps), "--model.validation.every_n_steps", str(num_steps)),
            *arguments,
        ]
        shutil.rmtree(out, ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-m", "rlplug", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{algorithm}, seed {seed}:\n{done.stdout[-4000:]}")
    rows = read_metrics(out / "001/metrics.jsonl")
    curve = Curve(algorithm, seed, [row for row in rows if "reward/mean" in row])
    seconds = sum(curve.column("time/step"))
    print(f"{algorithm}, seed {seed}: {curve.final:.3f} after {len(curve.rows)} steps, {seconds:.0f} s", flush=True)
    return curve


def table(curves: list[Curve], threshold: float) -> str:
    """Return one row per algorithm: over its seeds, the mean and in brackets the smallest and the largest."""
    first = curves[0].algorithm
    lines = [
        f"| algorithm | seeds | seeds that reach {threshold:g} | steps to {threshold:g} | reward, last {WINDOW} steps "
        f"| held-out pass@1 | completions drawn, of {first}'s | explained variance, last 20 steps "
        f"| s/step (median), of {first}'s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {curve.seed: curve for curve in curves if curve.algorithm == first}
    for algorithm in dict.fromkeys(curve.algorithm for curve in curves):
        mine = [curve for curve in curves if curve.algorithm == algorithm]
        steps = [step for curve in mine if (step := curve.steps_to(threshold)) is not None]
        explained = [
            statistics.fmean(values[-20:]) for curve in mine if (values := curve.column("critic/explained_variance"))
        ]
        cells = [
            algorithm,
            str(len(mine)),
            str(len(steps)),
            _range(steps, ".0f"),
            _range([curve.final for curve in mine], ".3f"),
            _range([curve.column("validate/pass@1")[-1] for curve in mine], ".2f"),
            _range([_drawn(curve) / _drawn(base[curve.seed]) for curve in mine], ".2f"),
            _range(explained, ".2f"),
            _range([_pace(curve) / _pace(base[curve.seed]) for curve in mine], ".2f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _drawn(curve: Curve) -> float:
    return sum(tokens / length for tokens, length in zip(*map(curve.column, _COUNTS), strict=True))


_COUNTS = ("completion/num_tokens", "completion/length_mean")


def _pace(curve: Curve) -> float:
    return statistics.median(curve.column("time/step"))


def _range(values: Sequence[float], form: str) -> str:
    """Return ``mean (smallest to largest)``, or a dash without values."""
    if not values:
        return "-"
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def write_curves(curves: list[Curve], threshold: float, out: Path) -> None:
    """Write ``curves.csv`` and ``curves.png``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with (out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["algorithm", "seed", "step", "reward/mean", "policy/entropy", "critic/explained_variance"])
        for curve in curves:
            for row in curve.rows:
                names = ("reward/mean", "policy/entropy", "critic/explained_variance")
                figures = [f"{row[name]:.4f}" if name in row else "" for name in names]
                writer.writerow([curve.algorithm, curve.seed, row["step"], *figures])
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for algorithm in dict.fromkeys(curve.algorithm for curve in curves):
        mine = [curve.rewards for curve in curves if curve.algorithm == algorithm]
        mean = [statistics.fmean(values) for values in zip(*mine, strict=False)]
        axes.plot(range(1, len(mean) + 1), mean, label=algorithm, linewidth=1.2)
    axes.axhline(threshold, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="mean reward", title="Mean reward over seeds, from random weights")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--task", choices=("sort", "credit"), default="sort", help="quickstart, or credit.py")
    parser.add_argument("--only", nargs="+", default=[], help="some of the algorithms, for sort")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="each algorithm runs once per seed")
    parser.add_argument("--steps", type=int, help="RL steps of a run; 180 for sort, 40 for credit")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step, for sort")
    parser.add_argument("--critic-epochs", type=int, default=8, help="passes of a critic over a step, for sort")
    parser.add_argument("--threshold", type=float, default=0.9, help="mean reward of a window to count steps to")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    is_credit = options.task == "credit"
    num_steps = options.steps or (credit.NUM_STEPS if is_credit else 180)
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = []
        for seed in options.seeds:
            lines = credit.arguments(seed) if is_credit else sort_runs(options)
            for name, line in lines.items():
                folder = options.out / "runs" / f"{name}-{seed}".replace(", ", "-").replace(" ", "-")
                runs.append(pool.submit(train, name, seed, num_steps, line, folder))
        curves = [run.result() for run in runs]
    (options.out / "table.md").write_text(table(curves, options.threshold))
    write_curves(curves, options.threshold, options.out)
    print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
