r"""Times whole GRPO steps in each way to wait less for the longest completion, in turns, on one machine.

    python benchmarks/step_modes.py --workload heavy-tailed --out OUT
    python benchmarks/step_modes.py --workload long --modes synchronous "stop when enough, 1.5" --out OUT
    python benchmarks/step_modes.py --modes synchronous --completions 512 --lengths alike drawn --out OUT
    python benchmarks/step_modes.py --modes "asynchronous, K = 2" --completions 512 --trainers 1 2 3 --out OUT
    python benchmarks/step_modes.py --table OUT

Needs GPUs, vLLM and rlplug with its plugins; ``--workload tiny`` tries it on a CPU. Model, prompts and lengths are
those of ``step.py``, and every trajectory keeps its length however often it is broken off. With ``--lengths alike
drawn`` a run first takes its steps with the same lengths on each GPU, so that GPUs differ in nothing, and then as many
with lengths that are drawn over all of them, as data would have them. Modes without servers have an engine in the
trainer's process, on each GPU. The others train on the first ``--trainers`` GPUs and start a vLLM server on each of the
rest; a single GPU is shared by both, in turns. Weights travel through the host then: NCCL wants a GPU for each of its
ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from step import HERE, run
from step_work import ALIKE, COMPLETIONS, DRAWN, LENGTHS, WORKLOADS, Workload

VERSIONS: Final = {"streamed": 0, **{f"asynchronous, K = {n}": n for n in (1, 2, 4)}}
"""``max_staleness`` of each asynchronous mode."""
SERVERS: Final = ("servers", *VERSIONS)
"""Modes with vLLM in a server."""
PARTIAL: Final = {
    **{f"stop when enough, {n}": f"{{over_provisioning: {n}, max_staleness: 2}}" for n in (1.25, 1.5, 2.0)},
    **{mode: f"{{asynchronous: true, max_staleness: {most}}}" for mode, most in VERSIONS.items()},
}
"""``model.partial_rollout`` of each mode but the synchronous ones."""
MODES: Final = ("synchronous", *PARTIAL, "servers")
COLUMNS: Final = {
    "decoding, s": "generate",
    "update, s": "update",
    "sync, s": "sync",
    "trainer waited, s": "wait_s",
    "engine idle, s": "engine_idle_s",
    "staleness, mean": "staleness_mean",
    "largest": "staleness_max",
    "tokens prefilled again": "reprefilled_tokens",
    "passes beside generation, s": "overlap_s",
}


def arguments(mode: str, workload: Workload, num_gpus: int, num_trainers: int) -> list[str]:
    """Return the options of ``rlplug fit`` that make a run of ``workload`` one of ``mode``."""
    chosen = ["--model.algorithm.correction", "{}"]
    if mode in PARTIAL:
        chosen += ["--model.partial_rollout", PARTIAL[mode]]
    if mode not in SERVERS:
        most_open = 2 * workload.num_completions // max(num_gpus, 1)
        return [*chosen, "--model.rollout.init_args.max_num_seqs", str(most_open)]
    servers = list(range(num_trainers, num_gpus)) or ([0] if num_gpus else [])
    most_open = (VERSIONS.get(mode, 0) + 1) * workload.num_completions // max(len(servers), 1)
    engine = {
        "max_model_len": workload.prompt + workload.longest,
        "max_num_seqs": most_open,
        "gpu_memory_utilization": 0.9 if num_gpus > 1 else workload.kv_cache_share,
        **({"gpus": servers} if servers else {}),
    }
    server = json.dumps({"class_path": "VLLMServerRollout", "init_args": engine})
    return [*chosen, "--trainer.devices", str(num_trainers), "--model.rollout", server]


def table(rows: dict[str, list[dict[str, Any]]], warm_up: int) -> str:
    """Return a line for each mode: means over its steps after ``warm_up``, beside the synchronous one."""
    found = {mode: [row for row in steps if row["step"] > warm_up] for mode, steps in rows.items()}
    means = {mode: statistics.fmean(row["seconds"] for row in steps) for mode, steps in found.items() if steps}
    lines = [f"| mode | steps | step, s | tokens/s | times synchronous | {' | '.join(COLUMNS)} | peak GiB |"]
    lines.append("|-" * (6 + len(COLUMNS)) + "|")
    for mode, seconds in means.items():
        steps = found[mode]
        tokens = statistics.fmean(row["completion_tokens"] for row in steps) / seconds
        synchronous = means.get(mode.replace(mode.partition(";")[0], "synchronous", 1))
        ratio = "" if synchronous is None else f"{synchronous / seconds:.2f}"
        cells = [f"{_mean(steps, name):.3g}" for name in COLUMNS.values()]
        peak = max((peak for row in steps for peak in row["peaks"].values()), default=float("nan"))
        lines.append(
            f"| {mode} | {len(steps)} | {seconds:.2f} | {tokens:,.0f} | {ratio} | {' | '.join(cells)} | {peak:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    values = [row["phases"].get(name, row["partial"].get(name, 0.0)) for row in steps]
    return max(values) if name.endswith("_max") else statistics.fmean(values)


def read(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the steps that ``out`` has, by mode."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (out / "modes.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row.pop("mode"), []).append(row)
    return found


def _named(mode: str, row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return a step's line with its mode; where there are kinds of lengths, with its kind and its number in that."""
    kind, number = divmod(row["step"] - 1, options.steps)
    if len(options.lengths) == 1:
        return {"mode": mode, **row}
    return {"mode": f"{mode}; {options.lengths[kind]}", **row, "step": number + 1}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="heavy-tailed")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--completions", type=int, help="of a step, in place of the workload's")
    parser.add_argument(
        "--lengths", nargs="+", choices=(ALIKE, DRAWN), default=[DRAWN], help="of completions, for --steps each"
    )
    parser.add_argument(
        "--trainers", type=int, nargs="+", default=[1], help="GPUs that train where servers have the others"
    )
    parser.add_argument("--steps", type=int, default=9, help="of each mode")
    parser.add_argument("--warm-up", type=int, default=3, help="steps at the start that are not counted")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rlplug-step", help="model, runs")
    parser.add_argument("--out", type=Path, help="folder for modes.jsonl, table.md and logs")
    parser.add_argument("rlplug", nargs="*", help="after --: options of rlplug fit, for all modes")
    parser.add_argument("--table", type=Path, metavar="OUT", help="print the table of a folder, and run nothing")
    options = parser.parse_args()
    if options.out is None and options.table is None:
        parser.error("--out is missing: the folder for the results")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run is ended too, and leaves the GPU
    options = parse()
    if options.table is not None:
        print(table(read(options.table), options.warm_up))
        return
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    workload, num_gpus = WORKLOADS[options.workload], torch.cuda.device_count()
    if options.completions is not None:
        workload = replace(workload, num_completions=options.completions)
        os.environ[COMPLETIONS] = str(options.completions)
    os.environ[LENGTHS] = " ".join(f"{kind}:{options.steps}" for kind in options.lengths)
    os.environ["STEP_THROUGH_HOST"] = str(int(num_gpus == 1))
    num_steps = str(options.steps * len(options.lengths))
    runs = [(mode, each) for mode in options.modes for each in (options.trainers if mode in SERVERS else [num_gpus])]
    for mode, num_trainers in runs:
        extra = [*arguments(mode, workload, num_gpus, num_trainers), *options.rlplug]
        if mode in SERVERS and num_gpus > 1:
            mode = f"{mode}, {num_trainers} + {num_gpus - num_trainers}"
        log = options.out / f"{mode.replace(', ', '-').replace(' ', '-')}.log"
        steps = run("step_rlplug.py", [options.workload, str(options.work), num_steps, *extra], log)
        with (options.out / "modes.jsonl").open("a") as file:
            file.writelines(json.dumps(_named(mode, row, options)) + "\n" for row in steps)
        (options.out / "table.md").write_text(table(read(options.out), options.warm_up))
        print((options.out / "table.md").read_text(), flush=True)


if __name__ == "__main__":
    main()
