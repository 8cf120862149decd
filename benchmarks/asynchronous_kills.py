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
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from launch_kills import MODEL, ROOT, is_alive, rows

sys.path.insert(0, str(ROOT / "tests"))

from doc_engine import write_engine
from forked import free_port

from rlplug.distributed.checkpoint_files import list_checkpoints

GONE_S, READY_S, DEADLINE_S, BACK_S = 30.0, 300.0, 20.0, 5.0
"""Seconds for all ranks to end, for a run to go on, for a server to become healthy, and until another one starts."""
GAME = ROOT / "examples/hidden_digit"
MIB = 1 << 20


class Servers:
    """Servers that outlive the run."""

    def __init__(self, folder: Path, environment: dict[str, str], model: Path) -> None:
        write_engine(folder / "engine", model)
        self._folder, self._environment = folder, environment
        self._running = {port: self._started(port) for port in (free_port(), free_port())}

    def _started(self, port: int) -> subprocess.Popen[bytes]:
        script = str(ROOT / "benchmarks/streaming_servers.py")
        command = [sys.executable, script, str(self._folder / "engine/settings.json"), "127.0.0.1", str(port)]
        with (self._folder / "servers.log").open("ab") as log:
            return subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._running]

    def kill(self, port: int) -> None:
        self._running[port].kill()
        self._running[port].wait()

    def start(self, port: int) -> None:
        self._running[port] = self._started(port)

    @property
    def ports(self) -> list[int]:
        return list(self._running)

    def close(self) -> None:
        for port in self._running:
            self.kill(port)


class Run:
    """A run, over as many starts as it takes."""

    def __init__(self, folder: Path, log: Path, environment: dict[str, str], arguments: list[str]) -> None:
        self.run_folder, self.log = folder / "runs/001", log
        self._environment = environment
        self.start(["-c", *arguments, "--run.dir", str(folder / "runs")])

    def start(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "rlplug", "fit", *arguments]
        self.began, self._output_begins = time.time(), self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def resume(self) -> None:
        self.start(["--resume", str(self.run_folder)])

    def output(self) -> str:
        """Return what the newest start has said."""
        with self.log.open("rb") as log:
            log.seek(self._output_begins)
            return " ".join(log.read().decode(errors="replace").split())

    def wait_for(self, what: str, condition: Callable[[], Any], timeout_s: float = READY_S) -> float:
        """Wait, and return the seconds that it took; an end of the process ends the wait too."""
        began = time.monotonic()
        while not condition() and self.process.poll() is None:
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"no {what} after {timeout_s:g} s; see {self.log}")
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_for_step(self) -> float:
        """Wait until this start has written a row after the newest checkpoint, or has ended."""
        return self.wait_for(
            "step", lambda: self._has_written() and self.num_steps() > self.ledger().get("step", 0) > 0
        )

    def _has_written(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return (self.run_folder / "metrics.csv").stat().st_mtime > self.began
        return False

    def ranks(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *(each for each in own.children(recursive=True) if "fit" in each.cmdline()[:4])]

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def end(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    # ---- what it has written --------------------------------------------------------------------------------------

    def num_steps(self) -> int:
        return len(rows(self.run_folder))

    def ledger(self) -> dict[str, Any]:
        """Return what the newest checkpoint has of the open groups; nothing where there is none."""
        for checkpoint in reversed(list_checkpoints(self.run_folder)):
            with contextlib.suppress(FileNotFoundError):  # a newer one has replaced it meanwhile
                state = torch.load(checkpoint / "meta.pt", weights_only=False)["rlplug"]
                return {"step": state["rollout_step"], **state["partial_rollout"]}
        return {}


# ---- what is done to a run --------------------------------------------------------------------------------------


def kill_rank(run: Run, chosen: random.Random, servers: Servers) -> dict[str, Any]:
    """Kill a rank at any time; the others must end, and the run goes on with the groups that were open."""
    everyone, ranks = run.processes(), run.ranks()
    rank = chosen.randrange(len(ranks))
    ranks[rank].send_signal(signal.SIGKILL)
    began = time.monotonic()
    while any(map(is_alive, everyone)) and time.monotonic() - began < 120:
        run.process.poll()
        time.sleep(0.05)
    ended = time.monotonic() - began
    ledger = run.ledger()
    run.resume()
    seconds = run.wait_for_step()
    resumed = next((row for row in rows(run.run_folder) if int(row["step"]) == ledger["step"] + 1), None)
    after = None if resumed is None else int(float(resumed["partial/groups_in_flight"]))
    before = len(ledger["ledger"]["open"])
    return {
        "rank": rank,
        "all ended after s": round(ended, 1),
        "checkpoint": ledger["step"],
        "a step after s": round(seconds, 1),
        "open groups before, after": [before, after],
        "is kept": ended < GONE_S and before == after,
    }


def kill_server(run: Run, chosen: random.Random, servers: Servers) -> dict[str, Any]:
    """Kill a server, and start another one on its port; the same process must go on."""
    port, step = chosen.choice(servers.ports), run.num_steps()
    servers.kill(port)
    time.sleep(BACK_S)
    servers.start(port)
    seconds = run.wait_for("three steps", lambda: run.num_steps() >= step + 3)
    restarts = run.output().count("restarts, and")
    return {"goes on after s": round(seconds + BACK_S, 1), "restarts so far": restarts, "is kept": restarts > 0}


def lose_server(run: Run, chosen: random.Random, servers: Servers) -> dict[str, Any]:
    """Kill a server for good; the run must end with a message that names it, and be resumable."""
    port = chosen.choice(servers.ports)
    servers.kill(port)
    began = time.monotonic()
    code = run.end(DEADLINE_S + 120)
    ended, said = time.monotonic() - began, f"127.0.0.1:{port}" in run.output()
    message = run.output()[-300:]
    servers.start(port)
    run.resume()
    seconds = run.wait_for_step()
    return {
        "exit status": code,
        "ended after s": round(ended, 1),
        "says": message,
        "a step after s": round(seconds, 1),
        "is kept": code == 1 and said,
    }


def fill_disk(run: Run, chosen: random.Random, servers: Servers) -> dict[str, Any]:
    """Fill the file system but for some bytes; the run must end with a message that names a file of the run."""
    left = chosen.choice([0, 4096, 64 << 10, MIB, 2 * MIB])
    filler = run.run_folder.parents[2] / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
        file.truncate(max(file.tell() - left, 0))
    step, began = run.num_steps(), time.monotonic()
    code = run.end(READY_S)
    ended, output = time.monotonic() - began, run.output()
    found = re.findall(rf"({re.escape(str(run.run_folder))}\S*) c\w+(?:not| not be| be) written: ([^(]*)", output)
    filler.unlink()
    run.resume()
    seconds = run.wait_for_step()
    return {
        "bytes left": left,
        "at step": step,
        "exit status": code,
        "ended after s": round(ended, 1),
        "says": [f"{Path(name).relative_to(run.run_folder)}: {why}" for name, why in found] or output[-500:],
        "a step after s": round(seconds, 1),
        "is kept": code == 1 and bool(found) and run.process.poll() in (None, 0),
    }


def wait_for_environment(run: Run, chosen: random.Random, servers: Servers) -> dict[str, Any]:
    """Let the run go on to its end."""
    code = run.end(1800)
    errors = (run.run_folder / "reward_errors.jsonl").read_text().splitlines()
    missing = sum(float(row["filter/missing_groups"]) for row in rows(run.run_folder))
    return {"failed trajectories": len(errors), "missing groups": missing, "is kept": code == 0 and bool(errors)}


FAULTS = {
    "rank": kill_rank,
    "server": kill_server,
    "lost-server": lose_server,
    "disk": fill_disk,
    "environment": wait_for_environment,
}

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
    ledger = run.ledger()
    still_open = {group["number"] for group in ledger["ledger"]["open"]}
    missing = set(range(ledger["ledger"]["num_started"])) - set(trained) - still_open
    started = [
        uids(each.run_folder) + Counter(group[0]["prompt"] for group in each.ledger()["trajectories"].values())
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
