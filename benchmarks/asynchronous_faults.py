"""A run, the servers beside it, and what ``asynchronous_kills.py`` does to them."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from launch_kills import ROOT, is_alive, rows

sys.path.insert(0, str(ROOT / "tests"))

from doc_engine import write_engine
from forked import free_port

from rlplug.distributed.checkpoints.files import list_checkpoints

GONE_S, READY_S, DEADLINE_S, BACK_S = 30.0, 300.0, 20.0, 5.0
"""Seconds for all ranks to end, for a run to go on, for a server to become healthy, and until another one starts."""
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
        return self.wait_for("step", lambda: self._has_written() and self.num_steps() > self.queue().get("step", 0) > 0)

    def _has_written(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return (self.run_folder / "metrics.jsonl").stat().st_mtime > self.began
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

    def queue(self) -> dict[str, Any]:
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
    queue = run.queue()
    run.resume()
    seconds = run.wait_for_step()
    resumed = next((row for row in rows(run.run_folder) if row["step"] == queue["step"] + 1), None)
    after = None if resumed is None else int(float(resumed["partial/groups_in_flight"]))
    before = len(queue["queue"]["open"])
    return {
        "rank": rank,
        "all ended after s": round(ended, 1),
        "checkpoint": queue["step"],
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
    missing = sum(row["filter/missing_share"] for row in rows(run.run_folder))
    return {"failed trajectories": len(errors), "missing groups": missing, "is kept": code == 0 and bool(errors)}


FAULTS = {
    "rank": kill_rank,
    "server": kill_server,
    "lost-server": lose_server,
    "disk": fill_disk,
    "environment": wait_for_environment,
}
