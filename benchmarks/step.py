"""Times whole GRPO steps of rlplug and of TRL on the same GPU, in turns, beside the bare parts and the physical floor.

    python benchmarks/step.py --workload fixed --out OUT
    python benchmarks/step.py --workload heavy-tailed --trl liger --rounds 2 --out OUT
    python benchmarks/step.py --workload fixed --sides rlplug --out OUT -- --model.sleep_between_rollouts true

Needs a GPU, vLLM, rlplug with its plugins, and for ``--sides trl`` TRL and datasets. Weights, prompts and rewards are
random; completions end at lengths that both sides share. Each side runs in a process of its own, and they alternate.
What is printed: seconds of a step and of its phases, tokens per second, the peak of the GPU's memory by whatever
took it, the update's share of the matrix-product ceiling (MFU) and the rollout's of the copy bandwidth, both measured
in the same call; the bare engine and the bare update; and the floor that follows from the two ceilings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, make_batch, matmul_ceiling, model_flops
from step_work import GROUP, WORKLOADS, Workload, floor_seconds, kv_bytes_per_token, num_parameters

HERE = Path(__file__).parent
TRL_BEST = ("liger", "liger, no checkpointing, no correction")


def copy_bandwidth(device: torch.device) -> float:
    """Return the best of 20 copies of 2 GiB on the device, in bytes read and written per second."""
    source = torch.randn(1 << 29, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * source.nbytes / min(times)


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


def bare_parts(name: str, log: Path) -> dict[str, float]:
    """Return the seconds of vLLM alone and of the update alone, in processes of their own."""
    workload = WORKLOADS[name]
    lengths = ["--heavy-tail", "--smallest", str(workload.smallest)] if workload.is_heavy_tailed else []
    longest = str(workload.prompt + workload.longest)
    updates = run(
        "update.py",
        [
            *("--shape", workload.shape, "--rows", str(workload.num_completions), "--prompt", str(workload.prompt)),
            *("--completion", str(workload.completion), "--longest", longest, *lengths, "--phases", "update"),
            *("--variants", "compile+fused"),
            *("--strategy", "{reshard_after_forward: false, reshard_after_backward: false}"),
        ],
        log,
    )
    generations = run(
        "rollout.py",
        [
            *("--phases", "bare", "--shape", workload.shape, "--sequences", str(workload.num_completions)),
            *("--group", str(GROUP), "--prompt", str(workload.prompt), "--new", str(workload.completion)),
            *("--longest", str(workload.longest), "--smallest", str(workload.smallest)),
            *("--share", str(workload.kv_cache_share), "--repeats", "2"),
        ],
        log,
    )
    seconds = [second for row in generations for second in row.get("seconds", []) if isinstance(row["seconds"], list)]
    parts = {"rollout": min(seconds)} if seconds else {}
    if updates and "update s" in updates[-1]:
        parts["update"] = updates[-1]["update s"]
    return parts


def summary(rows: Sequence[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Return medians over the steps after ``warm_up``, of seconds and phases, and the highest peaks."""
    counted = [row for row in rows if row["step"] > warm_up]
    if not counted:
        return {}
    names = {name for row in counted for name in row["phases"]}
    phases = {name: statistics.median(row["phases"].get(name, 0.0) for row in counted) for name in sorted(names)}
    peaks: dict[str, float] = {}
    for row in counted:
        for phase, peak in row["peaks"].items():
            peaks[phase] = max(peaks.get(phase, 0.0), peak)
    seconds = [row["seconds"] for row in counted]
    return {"seconds": statistics.median(seconds), "all": seconds, "phases": phases, "peaks": peaks}


def table(workload: Workload, found: dict[str, Any], parts: dict[str, float], ceilings: dict[str, float]) -> str:
    """Return what was found, as Markdown."""
    lengths = workload.lengths()
    num_tokens = sum(lengths) + workload.prompt * len(lengths)
    lines = ["| | s/step | tokens/s | rollout | update | the rest | peak GiB |", "|-|-|-|-|-|-|-|"]
    for side, result in found.items():
        phases = result["phases"]
        rollout = phases.get("generate", 0.0)
        update = phases.get("update", 0.0)
        rest = f"{result['seconds'] - rollout - update:.2f}" if update else ""
        columns = (f"{rollout:.2f}", f"{update:.2f}" if update else "", rest)
        peak = max(result["peaks"].values(), default=0.0)
        speed = f"{num_tokens / result['seconds']:,.0f}"
        lines.append(f"| {side} | {result['seconds']:.2f} | {speed} | {' | '.join(columns)} | {peak:.1f} |")
    if len(parts) == 2:
        both = sum(parts.values())
        lines.append(f"| bare parts | {both:.2f} | | {parts['rollout']:.2f} | {parts['update']:.2f} | | |")
    floor = floor_seconds(workload, ceilings["matmul"], ceilings["copy"], ceilings["gpus"])
    rollout, update = floor["rollout"], floor["update"]
    lines.append(f"| floor | {rollout + update:.2f} | | {rollout:.2f} | {update:.2f} | | |")
    return "\n".join(lines)


def shares(workload: Workload, result: dict[str, Any], ceilings: dict[str, float]) -> dict[str, float]:
    """Return what share of the ceilings rlplug's phases reach, and what is neither generation nor update."""
    config, lengths = SHAPES[workload.shape](), workload.lengths()
    batch = make_batch(workload.prompt, lengths, config.vocab_size)
    flops = model_flops(config, batch, is_update=True) / ceilings["gpus"]
    read = sum(kv_bytes_per_token(config) * (n * workload.prompt + n * (n - 1) / 2) for n in lengths)
    read = read / ceilings["gpus"] + 2 * num_parameters(config) * max(lengths)
    phases = result["phases"]
    return {
        "update, of the matrix-product ceiling": flops / phases["update"] / ceilings["matmul"],
        "rollout, of the copy bandwidth": read / phases["generate"] / ceilings["copy"],
        "neither generation nor update": 1 - (phases["generate"] + phases["update"]) / result["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="fixed")
    parser.add_argument("--sides", nargs="+", choices=("rlplug", "trl", "parts"), default=["rlplug", "trl", "parts"])
    parser.add_argument(
        "--trl", nargs="+", default=list(TRL_BEST), metavar="NAME", help="TRL's options, one after the other"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often the sides take turns")
    parser.add_argument("--steps", type=int, default=7, help="of each process, and of each of TRL's options")
    parser.add_argument("--warm-up", type=int, default=3, help="steps at the start that are not counted")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rlplug-step", help="model, runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for step.jsonl, table.md and logs")
    parser.add_argument("rlplug", nargs="*", help="after --: options of rlplug fit, to compare with the default")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    workload, on_gpu = WORKLOADS[options.workload], torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    ceilings = {
        "matmul": matmul_ceiling(device) if on_gpu else float("nan"),
        "copy": copy_bandwidth(device) if on_gpu else float("nan"),
        "gpus": max(torch.cuda.device_count(), 1),
    }
    if on_gpu:
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
    parts = bare_parts(options.workload, options.out / "parts.log") if "parts" in options.sides else {}
    found = {side: result for side, rows in steps.items() if (result := summary(rows, options.warm_up))}
    report = [f"workload {options.workload}: {workload}", f"ceilings: {ceilings}", f"parts: {parts}"]
    report += [table(workload, found, parts, ceilings)]
    report += [f"{side}: {json.dumps(result)}" for side, result in found.items()]
    if "rlplug" in found:
        ratios = {name: round(value, 3) for name, value in shares(workload, found["rlplug"], ceilings).items()}
        report.append(f"rlplug: {json.dumps(ratios)}")
        others = [result["seconds"] for side, result in found.items() if side != "rlplug"]
        if others:
            report.append(f"rlplug is {min(others) / found['rlplug']['seconds']:.2f} times as fast as TRL's best")
        if len(parts) == 2:
            report.append(f"rlplug takes {found['rlplug']['seconds'] / sum(parts.values()):.3f} times the bare parts")
    print("\n".join(report), flush=True)
    with (options.out / "step.jsonl").open("a") as file:
        for side, rows in steps.items():
            file.writelines(json.dumps({"workload": options.workload, "of": side, **row}) + "\n" for row in rows)
    (options.out / f"{options.workload}.md").write_text("\n\n".join(report) + "\n")


if __name__ == "__main__":
    main()
