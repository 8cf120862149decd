r"""Times whole GRPO steps of rlplug and of TRL on the same GPU, in turns, beside the bare parts and the physical floor.

    python benchmarks/step.py --workload fixed --out OUT
    python benchmarks/step.py --workload heavy-tailed --trl liger --rounds 2 --out OUT
    python benchmarks/step.py --workload fixed --sides rlplug --out OUT -- --model.memory.sleep_between_rollouts true
    python benchmarks/step.py --workload heavy-tailed --sides rlplug --out OUT -- --model.algorithm.correction {} \
        --model.partial_rollout "{over_provisioning: 1.5, max_staleness: 2}"
    python benchmarks/step.py --workload 8b-lora --sides rlplug trl plan --steps 4 --warm-up 2 --out OUT
    python benchmarks/step.py --workload heavy-tailed --completions 512 --sides rlplug --out OUT

Needs a GPU, vLLM, rlplug with its plugins, and for ``--sides trl`` TRL and datasets. Weights, prompts and rewards are
random; completions end at lengths that both sides share. Each side runs in a process of its own, and they alternate.
What is printed: seconds of a step and of its phases, tokens per second, the peak of the GPU's memory by whatever
took it, the update's share of the matrix-product ceiling (MFU) and the rollout's of the copy bandwidth, both measured
in the same call; the bare engine and the bare update; and the floor that follows from the two ceilings. ``--sides
plan`` says, on any machine, how many GPUs a workload of adapters would need if all weights trained.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import copy_bandwidth, matmul_ceiling
from step_plan import plans
from step_table import markdown, summary
from step_work import COMPLETIONS, GROUP, WORKLOADS, Workload

HERE = Path(__file__).parent
SIDES = ("rlplug", "trl", "parts", "plan")
TRL_BEST = ("liger", "liger, no checkpointing, no correction")


def run(script: str, arguments: Sequence[str], log: Path) -> list[dict[str, Any]]:
    """Run a script of this folder, and say so when it fails; return the lines of JSON that it prints."""
    began, output = time.perf_counter(), log.with_name(f"{log.stem}-{time.time():.0f}.out")
    with output.open("w") as lines, log.open("a") as others:
        command = [sys.executable, str(HERE / script), *arguments]
        code = subprocess.run(command, stdout=lines, stderr=others, check=False).returncode
    print(f"# {script} {' '.join(arguments[:4])}: {time.perf_counter() - began:.0f} s", flush=True)
    if code:
        print(f"# exit status {code}; the end of {log}:\n{log.read_text()[-1500:]}", flush=True)
    return [json.loads(line) for line in output.read_text().splitlines() if line.startswith('{"')]


def update_arguments(workload: Workload) -> list[str]:
    """Return the arguments of ``update.py`` for the update of ``workload`` alone."""
    lengths = ["--heavy-tail", "--smallest", str(workload.smallest)] if workload.is_heavy_tailed else []
    longest = str(workload.prompt + workload.longest)
    return [
        *("--shape", workload.shape, "--rows", str(workload.num_completions), "--prompt", str(workload.prompt)),
        *("--completion", str(workload.completion), "--longest", longest, *lengths, "--phases", "update"),
        *("--max-tokens", str(workload.max_tokens), "--lora", str(workload.lora_rank)),
        *("--variants", "compile+fused"),
        *("--strategy", "{reshard_after_forward: false, reshard_after_backward: false}"),
    ]


def rollout_arguments(workload: Workload) -> list[str]:
    """Return the arguments of ``rollout.py`` for the generation of ``workload`` by vLLM alone.

    ``--longest`` says that lengths differ, and is refused where it equals the mean.
    """
    lengths = ["--longest", str(workload.longest), "--smallest", str(workload.smallest)]
    return [
        *("--phases", "bare", "--shape", workload.shape, "--sequences", str(workload.num_completions)),
        *("--group", str(GROUP), "--prompt", str(workload.prompt), "--new", str(workload.completion)),
        *(lengths if workload.is_heavy_tailed else []),
        *("--share", str(workload.kv_cache_share), "--repeats", "2"),
    ]


def parts_of(updates: Sequence[dict[str, Any]], generations: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of the bare ``update`` and the bare ``rollout``, without those that failed.

    Args:
        updates: What ``update.py`` printed.
        generations: What ``rollout.py`` printed.
    """
    parts = {}
    if updates and "update s" in updates[-1]:  # else it says that it ran out of memory
        parts["update"] = updates[-1]["update s"]
    bare = [row for row in generations if (row["phase"], row["measure"]) == ("bare", "generate")]
    if bare:
        parts["rollout"] = min(min(row["seconds"]) for row in bare)
    return parts


def bare_parts(workload: Workload, log: Path) -> dict[str, float]:
    """Return the seconds of vLLM alone and of the update alone, in processes of their own."""
    updates = run("update.py", update_arguments(workload), log)
    return parts_of(updates, run("rollout.py", rollout_arguments(workload), log))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="fixed")
    parser.add_argument("--completions", type=int, help="of a step, in place of the workload's")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["rlplug", "trl", "parts"])
    parser.add_argument(
        "--trl", nargs="+", default=list(TRL_BEST), metavar="NAME", help="TRL's options, one after the other"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often the sides take turns")
    parser.add_argument("--steps", type=int, default=7, help="of each process, and of each of TRL's options")
    parser.add_argument("--warm-up", type=int, default=3, help="steps at the start that are not counted")
    parser.add_argument("--gpu-gib", type=float, default=139.8, help="memory of a GPU, for plan; an H200's by default")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rlplug-step", help="model, runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for step.jsonl, table.md and logs")
    parser.add_argument("rlplug", nargs="*", help="after --: options of rlplug fit, to compare with the default")
    options = parser.parse_args()
    if WORKLOADS[options.workload].lora_rank == 0 and "plan" in options.sides:
        parser.error(f"--sides plan: --workload {options.workload} has no adapters, give one that has")
    if options.completions is not None and "trl" in options.sides:
        parser.error("--completions is for rlplug and the parts: --sides trl takes the workload's own")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run is ended too, and leaves the GPU
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    workload = WORKLOADS[options.workload]
    if options.completions is not None:
        workload = replace(workload, num_completions=options.completions)
        os.environ[COMPLETIONS] = str(options.completions)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = max(torch.cuda.device_count(), 1)
    ceilings = {"matmul": matmul_ceiling(device), "copy": copy_bandwidth(device), "gpus": gpus}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    steps: dict[str, list[dict[str, Any]]] = {}
    arguments = [options.workload, str(options.work), str(options.steps)]
    for _ in range(options.rounds):
        if "rlplug" in options.sides:
            log = options.out / "rlplug.log"
            steps.setdefault("rlplug", []).extend(run("step_rlplug.py", [*arguments, *options.rlplug], log))
        if "trl" in options.sides:
            for line in run("step_trl.py", [*arguments, *options.trl], options.out / "trl.log"):
                steps.setdefault(f"TRL, {line['variant']}", []).append(line)
    parts = bare_parts(workload, options.out / "parts.log") if "parts" in options.sides else {}
    found = {side: result for side, rows in steps.items() if (result := summary(rows, options.warm_up))}
    report = [f"{options.workload}: {workload}; ceilings {ceilings}", markdown(workload, found, parts, ceilings)]
    if "plan" in options.sides:
        report.append(plans(workload, options.work, options.gpu_gib))
    if mine := found.get("rlplug"):
        if others := [result["seconds"] for side, result in found.items() if side != "rlplug"]:
            report.append(f"rlplug is {min(others) / mine['seconds']:.2f} times as fast as TRL's best")
        if len(parts) == 2:
            report.append(f"rlplug takes {mine['seconds'] / sum(parts.values()):.3f} times the bare parts")
    print("\n\n".join(report), flush=True)
    with (options.out / "step.jsonl").open("a") as file:
        for side, rows in steps.items():
            file.writelines(json.dumps({"workload": options.workload, "of": side, **row}) + "\n" for row in rows)
    (options.out / f"{options.workload}.md").write_text("\n\n".join(report) + "\n")


if __name__ == "__main__":
    main()
