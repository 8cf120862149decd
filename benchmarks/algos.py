"""Every algorithm on the quickstart's task: steps until 0.9 reward, time, final reward, what its critic explains.

``python benchmarks/algos.py --out OUT`` needs two CPU cores and about ten minutes per seed. All runs share the
quickstart's policy, prompts, sampling, learning rate and number of steps; ``OPTIONS`` is all that differs. ``OUT`` gets
``table.md``, ``curves.csv`` (mean reward per step) and ``curves.png``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 4e-4, "weight_decay": 0.0, "betas": [0.9, 0.95]}}
CRITIC = {"num_epochs": 8, "optimizer": ADAMW}
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

WITH_CRITIC = {
    "PPO": CRITIC,
    "VAPO": CRITIC,
    "PFPPO": CRITIC,
    "PPO, shared trunk": {"share_trunk": True, "optimizer": ADAMW},
}
THRESHOLD = 0.9
WINDOW = 5
"""Steps that rewards are averaged over, against the noise of a single one."""


@dataclass
class Curve:
    """One run."""

    algorithm: str
    seed: int
    seconds: float
    rows: list[dict[str, str]]

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows if row.get(name)]

    @property
    def rewards(self) -> list[float]:
        return self.column("reward/mean")

    @property
    def steps_to_threshold(self) -> int | None:
        """The first step whose window's mean reward reaches the threshold."""
        for step in range(WINDOW, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[step - WINDOW : step]) >= THRESHOLD:
                return step
        return None


def train(algorithm: str, seed: int, num_steps: int, out: Path) -> Curve:
    """Run one algorithm and return its curve."""
    class_path = algorithm.partition(",")[0]
    arguments = [
        *("fit", "--config", "configs/quickstart.yaml", "--run.report", "false", "--run.dir", str(out)),
        *("--model.algorithm", json.dumps({"class_path": class_path, "init_args": OPTIONS[class_path]})),
        *("--model.num_steps", str(num_steps), "--model.seed", str(seed), "--model.policy.seed", str(seed)),
        *("--checkpoint.every_n_steps", str(num_steps), "--model.validation.every_n_steps", str(num_steps)),
    ]
    if algorithm in WITH_CRITIC:
        arguments += ["--model.critic", json.dumps(WITH_CRITIC[algorithm])]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rlplug", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{algorithm}, seed {seed}:\n{done.stdout[-4000:]}")
    with (sorted(out.glob("[0-9]*"))[-1] / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("reward/mean")]
    curve = Curve(algorithm, seed, time.monotonic() - began, rows)
    final = statistics.fmean(curve.rewards[-WINDOW:])
    print(f"{algorithm}, seed {seed}: {final:.3f} after {len(rows)} steps, {curve.seconds:.0f} s", flush=True)
    return curve


def table(curves: list[Curve]) -> str:
    """Return one row per algorithm; with several seeds, the worst and the best."""
    first = curves[0]
    lines = [
        f"| algorithm | steps to {THRESHOLD} | reward, last {WINDOW} steps | held-out pass@1 "
        f"| completions drawn, of {first.algorithm}'s | explained variance, last 20 steps "
        f"| s/step (median), of {first.algorithm}'s | whole run, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for algorithm in dict.fromkeys(curve.algorithm for curve in curves):
        mine = [curve for curve in curves if curve.algorithm == algorithm]
        explained = [
            statistics.fmean(values[-20:]) for curve in mine if (values := curve.column("critic/explained_variance"))
        ]
        cells = [
            algorithm,
            _range([curve.steps_to_threshold for curve in mine], "d"),
            _range([statistics.fmean(curve.rewards[-WINDOW:]) for curve in mine], ".3f"),
            _range([curve.column("validate/pass@1")[-1] for curve in mine], ".2f"),
            _range([_drawn(curve) / _drawn(first) for curve in mine], ".2f"),
            _range(explained, ".2f") if explained else "-",
            _range([_pace(curve) / _pace(first) for curve in mine], ".2f"),
            _range([curve.seconds for curve in mine], ".0f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _drawn(curve: Curve) -> float:
    return sum(tokens / length for tokens, length in zip(*map(curve.column, _COUNTS), strict=True))


_COUNTS = ("completion/num_tokens", "completion/length_mean")


def _pace(curve: Curve) -> float:
    return statistics.median(curve.column("time/step"))


def _range(values: list[float] | list[int | None], form: str) -> str:
    if None in values:
        return "not reached"
    low, high = min(values), max(values)  # type: ignore[type-var]
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"


def write_curves(curves: list[Curve], out: Path) -> None:
    """Write ``curves.csv`` and ``curves.png``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with (out / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["algorithm", "seed", "step", "reward/mean", "policy/entropy", "critic/explained_variance"])
        for curve in curves:
            for row in curve.rows:
                figures = [
                    row.get(name) or "" for name in ("reward/mean", "policy/entropy", "critic/explained_variance")
                ]
                writer.writerow(
                    [curve.algorithm, curve.seed, row["step"], *(f"{float(x):.4f}" if x else "" for x in figures)]
                )
    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for algorithm in dict.fromkeys(curve.algorithm for curve in curves):
        mine = [curve.rewards for curve in curves if curve.algorithm == algorithm]
        mean = [statistics.fmean(values) for values in zip(*mine, strict=False)]
        axes.plot(range(1, len(mean) + 1), mean, label=algorithm, linewidth=1.2)
    axes.axhline(THRESHOLD, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="mean reward", title="Quickstart: three digits to sort, from random weights")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="+", default=[], help="some of the algorithms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="each algorithm runs once per seed")
    parser.add_argument("--steps", type=int, default=180, help="RL steps of a run")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.only or [*OPTIONS, "PPO, shared trunk"]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            pool.submit(train, name, seed, options.steps, options.out / "runs" / f"{name}-{seed}".replace(", ", "-"))
            for seed in options.seeds
            for name in names
        ]
        curves = [run.result() for run in runs]
    (options.out / "table.md").write_text(table(curves))
    write_curves(curves, options.out)
    print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
