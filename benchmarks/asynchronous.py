r"""Rewards by samples and by seconds: synchronous, stopping when enough, streamed, and at several bounds of staleness.

    python benchmarks/asynchronous.py --out OUT
    VLLM_API_KEY=... python benchmarks/asynchronous.py --out OUT --url http://127.0.0.1:8000
    python benchmarks/asynchronous.py --task smollm2 --model models/SmolLM2-135M-Instruct --puzzles FOLDER \
        --engine colocated --accelerator gpu --seeds 1 --steps 60 --at-once 7 --budget 280 --out OUT
    python benchmarks/asynchronous.py --draw OUT

Needs vLLM, rlplug and rlplug-rollout-vllm. All modes share policy, prompts, sampling, optimizer, importance correction
and engine. Each run starts a vLLM server of its own, on the last GPU where there are GPUs, or all use the one at
``--url``, in turn; a weight sync overwrites what the run before left there. With one GPU, server and trainer share it,
and weights go through the host: NCCL wants a GPU for each of its ranks. ``--engine colocated`` has vLLM in the
trainer's process, in the modes that can. ``FOLDER`` has what ``algos_smollm2.py prompts FOLDER`` writes.

``OUT`` gets ``table.md``, ``curves.csv``, ``curves.png``, and a folder for each run with its log. Seeds are the outer
loop. A run that has all its steps in ``OUT`` is not run again. SIGTERM and ``--budget`` end the runs; their rows stay.
Seconds are those of the steps, without starts and validations; with ``--at-once`` above 1 the runs share the machine,
and the picture says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from algos_smollm2 import task_arguments
from asynchronous_table import folder_of, read, write

PARTIAL: Final = {
    "stop when enough, 1.5": "{over_provisioning: 1.5, max_staleness: 2}",
    "stop when enough, 2.0": "{over_provisioning: 2.0, max_staleness: 2}",
    "streamed, K = 0": "{asynchronous: true, max_staleness: 0}",
    **{f"asynchronous, K = {bound}": f"{{asynchronous: true, max_staleness: {bound}}}" for bound in (1, 2, 4)},
}
"""``model.partial_rollout`` of each mode but the synchronous one."""
MODES: Final = ("synchronous", *PARTIAL)
GROUP: Final = 8
POLL_S: Final = 0.2
END_S: Final = 20.0
"""Seconds between two looks at a run, and for it to end after its time is over."""
LAST_LINES: Final = 30


def engine_of(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return ``model.rollout`` of a run: sizes for all requests that the mode has in flight."""
    if options.url:
        return {"class_path": "VLLMServerRollout", "init_args": {"urls": [options.url]}}
    is_server = options.engine == "servers" or "asynchronous: true" in PARTIAL.get(mode, "")
    sizes: dict[str, Any] = {
        "max_num_seqs": GROUP * options.prompts * (5 if is_server else 2),
        "max_num_batched_tokens": 4096,
        "enforce_eager": True,
        "kv_cache_gib": 3.0 if options.accelerator == "gpu" else 0.5,
    }
    if options.accelerator == "gpu":
        sizes["gpu_memory_utilization"] = 0.06  # what must be free at the start; kv_cache_gib says what is taken
    if options.task == "smollm2":
        sizes["max_model_len"] = 256
    if not is_server:
        return {"class_path": "VLLMRollout", "init_args": sizes}
    if options.accelerator == "gpu":
        sizes["gpus"] = [torch.cuda.device_count() - 1]
    return {"class_path": "VLLMServerRollout", "init_args": sizes}


def task_of(options: argparse.Namespace) -> list[str]:
    """Return the options of ``rlplug fit`` that all modes share; SmolLM2's are those of ``algos_smollm2.py``."""
    if options.task == "quickstart":
        device = ["--trainer.accelerator", options.accelerator, "--trainer.devices", "1"]
        return ["fit", "--config", "configs/quickstart.yaml", *device]
    return [
        *task_arguments(options.model, options.puzzles, options.accelerator, options.max_tokens),
        *("--model.algorithm.aggregation", "sequence", "--model.optimizer.init_args.lr", "2e-5"),
    ]


def command_of(mode: str, seed: int, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the command line of a run."""
    steps = str(options.steps)
    command = [
        *task_of(options),
        *("--run.report", "false", "--run.export_policy", "false", "--run.dir", str(folder)),
        *("--model.num_steps", steps, "--checkpoint.every_n_steps", steps),
        *("--model.seed", str(seed), "--model.policy.seed", str(seed)),
        *("--model.validation.every_n_steps", steps, "--model.validation.at_start", "false"),
        *("--model.batch.prompts_per_step", str(options.prompts), "--model.batch.group_size", str(GROUP)),
        *("--model.algorithm.correction", "{}", "--model.memory.sleep_between_rollouts", "false"),
        *("--model.rollout", json.dumps(engine_of(mode, options))),
    ]
    if mode in PARTIAL:
        command += ["--model.partial_rollout", PARTIAL[mode]]
    return command


def train(mode: str, seed: int, options: argparse.Namespace, is_over: Callable[[], bool]) -> str:
    """Run one mode, unless ``OUT`` has all its steps; return what became of it, an empty text if it ended well."""
    folder = folder_of(mode, seed, options.out)
    if len(read(folder)) == options.steps:
        return ""
    if is_over():
        return "no time was left to start it"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    here = Path(__file__).resolve()
    path = os.pathsep.join(filter(None, (str(here.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    with (folder / "log").open("wb") as log:
        command = [sys.executable, str(here), *command_of(mode, seed, folder, options)]
        process = subprocess.Popen(command, env=environment, cwd=here.parents[1], stdout=log, stderr=log)
        while process.poll() is None and not is_over():
            time.sleep(POLL_S)
        is_cut = process.poll() is None
        if is_cut:
            end(process)
    if is_cut:
        return f"its time was over after {len(read(folder))} steps"
    if process.returncode:
        said = (folder / "log").read_text(errors="replace").replace("\r", "\n").splitlines()[-LAST_LINES:]
        return "\n".join([f"ended with status {process.returncode} after {len(read(folder))} steps, and said:", *said])
    return ""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run, which ends its server; kill it where that takes too long."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--draw", type=Path, metavar="OUT", help="write table and picture of a folder, and run nothing")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=100, help="RL steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help=f"prompts of a step, of {GROUP} completions each")
    parser.add_argument("--task", choices=("quickstart", "smollm2"), default="quickstart")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--puzzles", type=Path, help="folder with train.jsonl and val.jsonl, for SmolLM2")
    parser.add_argument("--max-tokens", type=int, default=6144, help="of a micro-batch, for SmolLM2")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--engine", choices=("servers", "colocated"), default="servers", help="where vLLM generates")
    parser.add_argument("--url", help="vLLM server that runs already, with its key in VLLM_API_KEY")
    parser.add_argument("--at-once", type=int, default=1, help="runs that go on side by side")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which runs are ended")
    options = parser.parse_args()
    if (options.out is None) == (options.draw is None):
        parser.error("give one of --out, the folder for the results, and --draw")
    if options.task == "smollm2" and not (options.model and options.puzzles):
        parser.error("--task smollm2 needs --model and --puzzles")
    if options.url and (options.engine == "colocated" or options.at_once > 1):
        parser.error("--url is one server for one run at a time: remove --engine and --at-once")
    return options


def fit(arguments: list[str]) -> int:
    """Run ``rlplug fit``; where trainer and server have one GPU together, weights go through the host."""
    from rlplug.cli.main import main as rlplug

    if torch.cuda.device_count() == 1:
        from step_work import send_weights_through_the_host

        send_weights_through_the_host()
    return rlplug(arguments)


def main() -> int:
    options = parse()
    options.out = (options.draw or options.out).resolve()
    ends_at, samples, is_shared = time.monotonic() + options.budget, GROUP * options.prompts, options.at_once > 1
    is_told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_told_to_end.set())
    if options.draw:
        write(options.out, MODES, samples, is_shared)
        return 0
    lock, has_failed = threading.Lock(), False

    def run(seed: int, mode: str) -> None:
        nonlocal has_failed
        began = time.monotonic()
        said = train(mode, seed, options, lambda: is_told_to_end.is_set() or time.monotonic() > ends_at)
        with lock:
            has_failed |= bool(said)
            print(f"{mode}, seed {seed}: {said or 'done'} ({time.monotonic() - began:.0f} s)", flush=True)
            write(options.out, MODES, samples, is_shared)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(run, *zip(*itertools.product(range(options.seeds), options.modes), strict=True)))
    print((options.out / "table.md").read_text())
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(fit(sys.argv[1:]) if sys.argv[1:2] == ["fit"] else main())
