"""Drives small scripts in place of a trainer and of engine servers: ``python driver_case.py FOLDER OPTIONS-AS-JSON``.

The scripts below need no torch, so that a run with its servers starts within a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplug_launch import servers as servers_module
from rlplug_launch.config import LaunchConfig, ServersConfig
from rlplug_launch.driver import Driver
from rlplug_launch.launcher import LOST, Launcher, Place, RunningTask
from rlplug_launch.local import Local
from rlplug_launch.plan import LaunchPlan
from rlplug_launch.slurm import Slurm
from rlplug_launch.state import FOLDER

TRAINER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
folder, behaviour = Path(sys.argv[1]), sys.argv[2]
name = "trainer" if os.environ["NODE_RANK"] == "0" else "peer"
number = len(list(folder.glob(f"{name}-*.json")))
sleep = [sys.executable, "-c", "import time; time.sleep(600)", f"{folder}/rank"]
rank = subprocess.Popen(sleep, start_new_session=True)
def save(*_):
    (folder / "saved").write_text(" ".join(sorted(path.name for path in folder.glob("server-*.running"))))
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
seen = {"pid": os.getpid(), "rank": rank.pid, "arguments": sys.argv[3:], "host": os.uname().nodename}
prefixes = ("A_KEY", "NODE_RANK", "MASTER_", "RLPLUG_")
seen["environment"] = {n: v for n, v in os.environ.items() if n.startswith(prefixes)}
partial = folder / f"{name}.partial"
partial.write_text(json.dumps(seen))
partial.rename(folder / f"{name}-{number}.json")
print("a line of the trainer", flush=True)
if behaviour == "wrong":
    sys.exit(2)
if behaviour == "fails":
    sys.exit("the last words")
if behaviour == "finishes":
    sys.exit(0)
while not (folder / "finish").exists():
    time.sleep(0.05)
"""
SERVER = """
import os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
folder, host, port = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        while (folder / f"server-{port}.hangs").exists():
            time.sleep(0.1)
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
server = HTTPServer((host, port), Handler)
(folder / f"server-{port}.running").write_text(str(os.getpid()))
(folder / f"server-{port}.host").write_text(os.uname().nodename)
try:
    server.serve_forever()
finally:
    (folder / f"server-{port}.running").unlink()
"""
UNHEALTHY = "import time; print('loading for ever', flush=True); time.sleep(600)"


@dataclass(frozen=True)
class ScriptPlan(LaunchPlan):
    """A plan whose trainer is the script above."""

    folder: Path = Path()
    behaviour: str = ""

    def trainer_command(self, start: Sequence[str], urls: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", TRAINER, str(self.folder), self.behaviour, *super().trainer_command(start, urls)]


class LosableTask(RunningTask):
    """A task whose node is lost once a file is there."""

    def __init__(self, task: RunningTask, file: Path) -> None:
        self.task, self.file = task, file

    def poll(self) -> int | None:
        if self.file.exists():
            self.kill()
            return LOST
        return self.task.poll()

    def terminate(self) -> None:
        self.task.terminate()

    def kill(self) -> None:
        self.task.kill()


class LosingLocal(Local):
    """Loses the node of the first server, and has another one for it later."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.is_moved = folder, False

    def start(self, index: int, *arguments: Any) -> RunningTask:
        task = super().start(index, *arguments)
        return LosableTask(task, self.folder / "lost") if index == 1 and not self.is_moved else task

    def replace(self, index: int) -> Place | None:
        self.is_moved = (self.folder / "room").exists()
        return Place("elsewhere", "127.0.0.1", ()) if self.is_moved else None


def main() -> int:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    run_folder = folder / "run"
    (run_folder / FOLDER).mkdir(parents=True)
    config_file = run_folder / FOLDER / "config.yaml"
    config_file.touch()
    for name in options.get("make", []):
        (run_folder / name).mkdir(parents=True)
    script = folder / "server.py"
    script.write_text(UNHEALTHY if options.get("unhealthy") else SERVER)
    command = f"{sys.executable} {script} {folder} {{host}} {{port}}"
    deadline_s = 5.0 if options.get("unhealthy") else 20.0 if options.get("hanging") else 60.0
    servers_module.HEALTHY_EVERY_S = 0.5  # type: ignore[misc]
    servers = ServersConfig(command, options.get("servers", 2), 0, "/ready", start_deadline_s=deadline_s)
    config = LaunchConfig(None, servers, options.get("max_restarts", 1), grace_s=20.0)
    plan = ScriptPlan(
        config, options.get("nodes", 1), 2, False, "A_KEY", folder=folder, behaviour=options.get("behaviour", "waits")
    )
    launcher: Launcher = Slurm() if options.get("slurm") else Local()
    if options.get("losing"):
        launcher = LosingLocal(folder)
        servers_module.PLACE_EVERY_S = 0.5  # type: ignore[misc]
    checkpoint = str(run_folder / options["checkpoint"]) if "checkpoint" in options else None
    return Driver(plan, launcher, type(launcher).__name__, run_folder, config_file, checkpoint).run()


if __name__ == "__main__":
    sys.exit(main())
