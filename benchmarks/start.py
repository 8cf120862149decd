"""Times the start of one run twice: with an empty folder for compiled code, and with what the first start left there.

    python benchmarks/start.py --workload fixed              # VLLMRollout, CompileBlocks and FusedLogprobs; needs a GPU
    python benchmarks/start.py --workload tiny               # the same on a CPU
    python benchmarks/start.py -c configs/quickstart.yaml    # any configuration of rlplug fit
    python benchmarks/start.py --workload fixed --pairs 2 -- --model.rollout.enforce_eager true

Each start is a process of its own, which takes one step. The table has the phases that the run itself writes into
``run.json``; docs/the-step.md says what they are. ``whole command`` is measured from outside, with what comes after the
step. ``cold`` is said of compiled code alone: files that the operating system has read before are read from memory, so
the first start after an installation takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from step_rlplug import prepared
from step_work import WORKLOADS

HERE = Path(__file__).parent
LIBRARIES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "SGLANG_CACHE_DIR",
    "SGLANG_DG_CACHE_DIR",
)
"""Variables that would win over ``run.compile_cache``: starts do not get them."""


def start(options: list[str], cache: Path, folder: Path) -> dict[str, Any]:
    """Run one step with ``cache`` for compiled code, in ``folder``; return what ``run.json`` says of the start."""
    ours = {"model.num_steps": 1, "run.dir": folder, "run.compile_cache": cache, "run.report": "false"}
    ours |= {"run.export_policy": "false", "checkpoint.every_n_steps": 1000}
    command = [sys.executable, "-m", "rlplug", "fit", *options, *(f"--{key}={value}" for key, value in ours.items())]
    environment = {name: value for name, value in os.environ.items() if name not in LIBRARIES}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    began, log = time.monotonic(), folder / "log"
    with log.open("w") as lines:
        status = subprocess.run(command, env=environment, stdout=lines, stderr=lines, check=False).returncode
    seconds = time.monotonic() - began
    if status:
        raise SystemExit(f"{log.read_text()[-3000:]}\nrlplug fit ended with status {status}; its output is in {log}")
    record: dict[str, Any] = json.loads((folder / "001" / "run.json").read_text())["start"]
    return record | {"command": round(seconds, 2)}


def rows_of(starts: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return the table's rows: a row per phase, a column per start."""
    names = list(dict.fromkeys(name for each in starts.values() for name in each["seconds"]))
    rows = [[name, *(f"{each['seconds'].get(name, 0.0):.1f}" for each in starts.values())] for name in names]
    rows.append(["to the end of the first step", *(f"{sum(each['seconds'].values()):.1f}" for each in starts.values())])
    rows.append(["torch.compile", *(f"{each['compilation']['seconds']:.1f}" for each in starts.values())])
    for name in ("num_cached", "num_compiled"):
        rows.append([f"graphs {name.removeprefix('num_')}", *(str(e["compilation"][name]) for e in starts.values())])
    return [*rows, ["whole command", *(f"{each['command']:.1f}" for each in starts.values())]]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", choices=WORKLOADS, help="of benchmarks/step_work.py")
    what.add_argument("-c", "--config", action="append", type=Path, help="of rlplug fit; may be repeated")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of starts; the first of each has an empty folder")
    parser.add_argument("--out", type=Path, help="folder for models, logs and runs; by default a temporary one")
    parser.add_argument("rlplug", nargs="*", help="after --: options of rlplug fit")
    options = parser.parse_args()
    if missing := [file for file in options.config or () if not file.is_file()]:
        parser.error(f"-c {missing[0]}: there is no such file")
    return options


def main() -> None:
    options = parse()
    out = Path(tempfile.mkdtemp(prefix="rlplug-start-")) if options.out is None else options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.workload:
        of_workload = prepared(options.workload, out, 1)[1:]
        base = [*of_workload, "--trainer.callbacks=null"]  # without the clock of steps, which ends the process
    else:
        base = [part for file in options.config for part in ("-c", str(file))]
    starts: dict[str, dict[str, Any]] = {}
    for pair in range(1, options.pairs + 1):
        cache = Path(tempfile.mkdtemp(prefix="cache-", dir=out))
        for kind in ("cold", "warm"):
            name = f"{kind} {pair}"
            starts[name] = start([*base, *options.rlplug], cache, Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=out)))
            print(json.dumps({"start": name, **starts[name]}), flush=True)
    print(f"\n| seconds | {' | '.join(starts)} |\n|---|{'---:|' * len(starts)}")
    for row in rows_of(starts):
        print(f"| {' | '.join(row)} |")
    print(f"\nlogs and runs: {out}")


if __name__ == "__main__":
    main()
