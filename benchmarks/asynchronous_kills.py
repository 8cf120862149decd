"""Disturbs asynchronous runs, and says whether each kept what docs/asynchronous.md promises.

    python benchmarks/asynchronous_kills.py --victim rank --times 10 --max-staleness 1
    python benchmarks/asynchronous_kills.py --victim server --times 5
    python benchmarks/asynchronous_kills.py --victim lost-server --times 2
    python benchmarks/asynchronous_kills.py --victim disk --times 6
    python benchmarks/asynchronous_kills.py --victim environment

A run trains a tiny model beside two servers of this host that nobody launched (``streaming_servers.py``), at
``rollout.urls``. What is done to it, at random times:

- ``rank``: a rank gets SIGKILL. The others must end, and the run is resumed.
- ``server``: a server gets SIGKILL, and another one starts on its port 5 s later. The run must go on.
- ``lost-server``: the same, but the server starts only after the run has ended, and the run is resumed.
- ``disk``: the run folder's file system, a tmpfs that only root may mount, is filled. The run must end with a message
  that names the file. There is room again, and the run is resumed.
- ``environment``: one in every hundred answers of the environment never comes. The run must go on.

A line of JSON says what followed each time. The last one says whether each step is there once, each group trained once
or is open in the last checkpoint, no prompt is missing beside a run that nobody disturbed, and no group was too old. It
exits with 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from asynchronous_faults import DEADLINE_S, FAULTS, Run, Servers
from launch_kills import MODEL, ROOT, rows

GAME = ROOT / "examples/hidden_digit"


# ---- what must be true at the end ---------------------------------------------------------------------------------


def uids(run_folder: Path) -> Counter[str]:
    """Return how many groups of each prompt trained."""
    lines = map(json.loads, (run_folder / "samples.jsonl").read_text().splitlines())
    groups = {(line["step"], line["prompt_uid"], line["group"]) for line in lines if line["phase"] == "train"}
    return Counter(uid for _, uid, _ in groups)


def summary(run: Run, calm: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Compare a run with one that nobody disturbed."""
    table, other = rows(run.run_folder), rows(calm.run_folder)
    lines = [json.loads(line) for line in (run.run_folder / "groups.jsonl").read_text().splitlines()]
    trained = [number for line in lines for take in line["groups"] for number in take]
    queue = run.queue()
    still_open = {group["number"] for group in queue["queue"]["open"]}
    missing = set(range(queue["queue"]["num_started"])) - set(trained) - still_open
    started = [
        uids(each.run_folder) + Counter(group[0]["prompt"] for group in each.queue()["trajectories"].values())
        for each in (run, calm)
    ]
    steps = [int(row["step"]) for row in table]
    return {
        "steps": len(table),
        "each step once": steps == [line["step"] for line in lines] == list(range(1, options.steps + 1)),
        "groups trained": len(trained),
        "groups trained twice": len(trained) - len(set(trained)),
        "groups lost": len(missing) + len(still_open & set(trained)),
        "prompts lost": (started[1] - started[0]).total(),
        "prompts twice": (started[0] - started[1]).total(),
        "open groups, all steps": sorted({int(float(row["partial/groups_in_flight"])) for row in table}),
        "largest staleness": max(int(float(row["partial/staleness_max"])) for row in table),
        "reward, quarters": quarters(table),
        "undisturbed": quarters(other),
    }


def quarters(table: list[dict[str, str]]) -> list[float]:
    """Return the mean reward of each quarter of the steps."""
    rewards, size = [float(row["reward/mean"]) for row in table], len(table) // 4
    return [round(statistics.fmean(rewards[part * size : (part + 1) * size]), 3) for part in range(4)]


def is_whole(row: dict[str, Any], options: argparse.Namespace) -> bool:
    names = ("groups trained twice", "groups lost", "prompts lost", "prompts twice")
    return (
        row["each step once"]
        and not any(row[name] for name in names)
        and row["largest staleness"] <= options.max_staleness
        and row["open groups, all steps"] == [options.max_staleness * options.prompts]
    )


# ---- the command --------------------------------------------------------------------------------------------------


def arguments_of(options: argparse.Namespace, urls: list[str]) -> list[str]:
    """Return the options of a run, a configuration file first."""
    game = options.victim == "environment"
    config = ["configs/hidden_digit.yaml"] if game else ["configs/quickstart.yaml", "--model.policy.path", str(MODEL)]
    own = ["--model.environment", "streaming_servers.HungDigit", "--model.turns.step_deadline_s", "3"] if game else []
    rollout = {"urls": urls, "start_deadline_s": DEADLINE_S}
    partial = f"{{asynchronous: true, max_staleness: {options.max_staleness}}}"
    return [
        *(*config, *own, "--trainer.devices", str(options.ranks), "--run.report", "false"),
        *("--model.rollout", "streaming_servers.StreamingRollout", "--model.rollout.init_args", json.dumps(rollout)),
        *("--model.algorithm.correction", "{}", "--model.partial_rollout", partial),
        *("--model.batch.prompts_per_step", str(options.prompts), "--model.batch.group_size", "4"),
        *("--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"),
        *("--model.num_steps", str(options.steps), "--checkpoint.every_n_steps", "5", "--checkpoint.keep", "2"),
        *("--run.samples_per_step", str(4 * options.prompts)),
    ]


@contextlib.contextmanager
def disk_of(folder: Path, options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of a run, which is a small file system of its own where that is to be filled."""
    folder.mkdir()
    if options.victim != "disk":
        yield folder / "run"
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(folder)], check=True)
    try:
        yield folder / "run"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disturb(run: Run, options: argparse.Namespace, servers: Servers) -> bool:
    """Disturb a run at random times until that was done often enough, or the run has ended."""
    chosen, is_kept = random.Random(options.seed), True
    for number in range(1, options.times + 1):
        run.wait_for_step()
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(chosen.uniform(0.0, options.most_s))
        if run.process.poll() is not None:
            break
        step = run.num_steps()
        row = FAULTS[options.victim](run, chosen, servers)
        is_kept &= row["is kept"]
        print(json.dumps({"time": number, "of": options.victim, "at step": step} | row), flush=True)
    return is_kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=FAULTS, default="rank")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=4, help="groups of a step, of 4 completions each")
    parser.add_argument("--most-s", type=float, default=4.0, help="longest time from a step to the next fault")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="asynchronous-kills-"))
    path = os.pathsep.join(map(str, [folder / "engine", ROOT / "benchmarks", ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MY_ENGINE_KEY": "a-key"}
    print(json.dumps({"folder": str(folder)}), flush=True)
    servers = Servers(folder, environment, GAME / "model" if options.victim == "environment" else MODEL)
    try:
        with disk_of(folder / "disturbed", options) as place:
            arguments = arguments_of(options, servers.urls)
            calm = Run(folder / "calm", folder / "calm.log", environment, arguments)
            if code := calm.end(1800):
                raise RuntimeError(f"{code}: {calm.output()[-4000:]}")
            run = Run(place, folder / "disturbed.log", environment, arguments)
            is_kept = disturb(run, options, servers)
            code = run.end(1800)
            row = {"exit status": code} | summary(run, calm, options)
    finally:
        servers.close()
        for process in psutil.Process().children(recursive=True):
            process.kill()
    print(json.dumps(row), flush=True)
    return 0 if is_kept and code == 0 and is_whole(row, options) else 1


if __name__ == "__main__":
    sys.exit(main())
