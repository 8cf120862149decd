"""Kills parts of launched runs at random times, and says whether each run kept what docs/many-hosts.md promises.

    python benchmarks/launch_kills.py --launcher local --victim server --kills 10
    python benchmarks/launch_kills.py --launcher ray --victim trainer --kills 5
    python benchmarks/launch_kills.py --launcher local --victim server --kills 3 --engine vllm

A run trains a tiny model with two engine servers: those of ``rlplug new-plugin --kind engine``, around transformers, or
vLLM's on the CPU. With ``--launcher ray``, each task has a Ray node of its own on this machine, with one to spare, and
the victim of ``server`` and ``trainer`` is the whole node: its raylet and all that runs under it gets SIGKILL. The
victim of ``driver`` is ``rlplug launch`` itself, and the run is resumed.

A line of JSON says what followed each kill. The last one compares the run with one that nobody disturbed: rows of
``metrics.jsonl`` and all completions of ``samples.jsonl``. It exits with 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from doc_engine import write_engine  # noqa: E402

from rlplug.observability.metrics_log import read_metrics  # noqa: E402

MODEL = ROOT / "tests/model"
COMPARED = ("loss", "policy/grad_norm", "reward/mean", "completion/length_mean")
NUM_TASKS = 3
"""A trainer and two servers."""
GRACE_S, GONE_S, READY_S = 20.0, 30.0, 400.0
"""Seconds for the trainer to save, for all to end after that or after a fault, and for a run to go on."""
VLLM = (
    "env VLLM_SERVER_DEV_MODE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 "
    f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {MODEL} --host {{host}} "
    "--port {port} --dtype float32 --max-model-len 32 --load-format dummy "
    "--skip-tokenizer-init --generation-config vllm --logprobs-mode processed_logprobs --enforce-eager "
    """--weight-transfer-config '{"backend": "rlplug_gloo"}' --enable-scale-out --disable-uvicorn-access-log """
    "--middleware rlplug_rollout_vllm.server_key.RequireKey"
)


class Cluster:
    """A Ray cluster of this machine, in a process of its own; each node has room for one task."""

    def __init__(self, num_nodes: int, environment: dict[str, str]) -> None:
        command, pipe = [sys.executable, __file__, "--serve-cluster", str(num_nodes)], subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.address = self._answer()

    def lose(self, prefix: str) -> None:
        """Kill the node whose id begins with ``prefix``, and add another one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prefix}\n")
        self._process.stdin.flush()
        assert self._answer() == "lost"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def serve_cluster(num_nodes: int) -> None:
    """Run a cluster until stdin ends; each line names a node to lose."""
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(num_nodes):
        cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        (node,) = [node for node in cluster.worker_nodes if node.node_id.startswith(line.strip())]
        node.kill_raylet()
        cluster.worker_nodes.remove(node)
        print("lost", flush=True)
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        cluster.add_node(num_cpus=1)
    cluster.shutdown()


class Finished(Exception):
    """The run has ended with success."""


class Run(contextlib.AbstractContextManager["Run"]):
    """One run, over as many drivers as it takes. The end of its context kills the driver, and so ends all."""

    def __init__(self, folder: Path, environment: dict[str, str], arguments: list[str]) -> None:
        self.folder = folder
        self.run_folder = folder / "runs/001"
        self.log = folder / "output"
        folder.mkdir()
        self._environment = environment | {"RLPLUG_KILLS": str(folder)}
        self.launch([*arguments, "--run.dir", str(folder / "runs")])

    def __exit__(self, *_: object) -> None:
        self.driver.kill()
        self.driver.wait()

    def launch(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "rlplug", "launch", *arguments]
        with self.log.open("ab") as file:
            self.driver = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=file, stderr=subprocess.STDOUT
            )

    def state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((self.run_folder / "launch/state.json").read_text())
            if state["pid"] == self.driver.pid:
                return dict(state)
        return {"status": "", "attempt": 0, "tasks": []}

    def wait_for(self, what: str, condition: Callable[[], Any], timeout_s: float = READY_S) -> float:
        """Wait, and return the seconds that it took.

        Raises:
            Finished: The run came to its end before that.
        """
        began = time.monotonic()
        while not condition():
            if self.driver.poll() == 0:
                raise Finished
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"{what} after {timeout_s:g} s; see {self.log}")
            if self.driver.poll() not in (None, -signal.SIGKILL):
                raise RuntimeError(f"the driver ended with {self.driver.poll()} before {what}; see {self.log}")
            time.sleep(0.1)
        return time.monotonic() - began

    def is_whole(self) -> bool:
        """Whether the trainer and all servers run."""
        state = self.state()
        return state["status"] == "running" and {task["state"] for task in state["tasks"]} == {"running", "healthy"}

    def tasks(self, role: str) -> list[dict[str, Any]]:
        return [task for task in self.state()["tasks"] if task["name"].startswith(role)]

    def num_steps(self) -> int:
        return len(rows(self.run_folder))

    def has_trained_since(self, moment: float) -> bool:
        """Whether a row was written since then, a time of ``time.time()``."""
        with contextlib.suppress(FileNotFoundError):
            return (self.run_folder / "metrics.jsonl").stat().st_mtime > moment
        return False

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the run, but for the driver."""
        return [each for each in psutil.process_iter() if each.pid != self.driver.pid and self._is_own(each)]

    def _is_own(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            environment = process.environ()
            is_marked = environment.get("RLPLUG_KILLS") == str(self.folder)
            return is_marked or f"{self.folder}/" in " ".join(process.cmdline())
        return False


def kill_server(run: Run, chosen: random.Random, cluster: Cluster | None) -> dict[str, Any]:
    """Kill a server, or its node; the trainer must go on, and the server must come back."""
    task, attempt = chosen.choice(run.tasks("server")), run.state()["attempt"]
    if cluster is not None:
        cluster.lose(task["node"].partition("/")[2])
    else:
        port = task["address"].partition(":")[2]
        for process in run.processes():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if port in words and "rlplug_launch.node" not in words:
                    process.send_signal(signal.SIGKILL)
    run.wait_for("notice of the loss", lambda: not run.is_whole(), 60)
    seconds = run.wait_for("a new server", run.is_whole)
    return {"is back after s": round(seconds, 1), "is kept": run.state()["attempt"] == attempt}


def kill_trainer(run: Run, chosen: random.Random, cluster: Cluster | None) -> dict[str, Any]:
    """Kill a rank of the trainer, or its node; all must stop within 30 s, and go on from the newest checkpoint."""
    attempt, before = run.state()["attempt"], run.processes()
    if cluster is not None:
        cluster.lose(run.tasks("trainer")[0]["node"].partition("/")[2])
    else:
        ranks = [each for each in before if "fit" in each.cmdline()[:4] and "rlplug_launch.node" not in each.cmdline()]
        chosen.choice(ranks).send_signal(signal.SIGKILL)
    ended = run.wait_for("the end of all", lambda: not any(map(is_alive, before)), 120)
    seconds = run.wait_for("the run", lambda: run.is_whole() and run.state()["attempt"] > attempt)
    return {
        "all ended after s": round(ended, 1),
        "goes on after s": round(ended + seconds, 1),
        "is kept": ended < GONE_S,
    }


def kill_driver(run: Run, chosen: random.Random, cluster: Cluster | None) -> dict[str, Any]:
    """Kill the driver; nothing may stay behind, and the run resumes."""
    run.driver.send_signal(signal.SIGKILL)
    run.driver.wait()
    ended = run.wait_for("the end of all", lambda: not run.processes(), GRACE_S + GONE_S)
    run.launch(["--resume", str(run.run_folder)])
    seconds = run.wait_for("the run", run.is_whole)
    return {"all ended after s": round(ended, 1), "goes on after s": round(ended + seconds, 1), "is kept": True}


KILLS = {"server": kill_server, "trainer": kill_trainer, "driver": kill_driver}


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def rows(run_folder: Path) -> list[dict[str, float]]:
    return read_metrics(run_folder / "metrics.jsonl")


def completions(run_folder: Path) -> Counter[tuple[Any, ...]]:
    lines = map(json.loads, (run_folder / "samples.jsonl").read_text().splitlines())
    return Counter((line["step"], line["prompt"], line["completion"]) for line in lines)


def compare(run_folder: Path, expected: Path) -> dict[str, Any]:
    """Compare a run with one that nobody disturbed."""
    mine, other = rows(run_folder), rows(expected)
    steps = [row["step"] for row in mine] == [row["step"] for row in other]
    equal = sum(all(a[name] == b[name] for name in COMPARED) for a, b in zip(mine, other, strict=False))
    got, wanted = completions(run_folder), completions(expected)
    prompts = [Counter((step, prompt) for step, prompt, _ in each.elements()) for each in (got, wanted)]
    return {
        "steps": len(mine),
        "each step once": steps,
        "rows equal to the last digit": equal,
        "completions": got.total(),
        "prompts lost": (prompts[1] - prompts[0]).total(),
        "prompts twice": (prompts[0] - prompts[1]).total(),
        "other completions": (got - wanted).total(),
    }


@contextlib.contextmanager
def environment_of(folder: Path, options: argparse.Namespace) -> Iterator[tuple[dict[str, str], Cluster | None]]:
    """Yield the environment of drivers, and the cluster."""
    path = os.pathsep.join([str(folder / "engine"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    cluster = Cluster(NUM_TASKS + 1, environment) if options.launcher == "ray" else None
    try:
        yield environment | ({"RAY_ADDRESS": cluster.address} if cluster else {}), cluster
    finally:
        if cluster is not None:
            cluster.close()


def arguments_of(folder: Path, options: argparse.Namespace) -> list[str]:
    """Write the section ``launch``, and return the options of a run."""
    engine = "launched_engine.LaunchedRollout"
    command = write_engine(folder / "engine", MODEL)
    if options.engine == "vllm":
        engine, command = "VLLMServerRollout", VLLM
    servers = {"command": command, "count": 2, "gpus": 0}
    launch = {"servers": servers, "max_restarts": 1000, "grace_s": GRACE_S}
    (folder / "launch.yaml").write_text(yaml.safe_dump({"launch": launch}))
    return [
        *("--launcher", options.launcher, "-c", str(folder / "launch.yaml"), "-c", "configs/quickstart.yaml"),
        *("--model.policy.path", str(MODEL), "--model.rollout", engine, "--trainer.devices", str(options.ranks)),
        *("--model.batch.prompts_per_step", "4", "--model.batch.group_size", "4", "--run.report", "false"),
        *("--model.validation.at_start", "false", "--model.validation.every_n_steps", "null"),
        *("--model.num_steps", str(options.steps), "--checkpoint.every_n_steps", "5", "--checkpoint.keep", "2"),
        *("--run.samples_per_step", "16", "--model.limits.max_engine_restarts", "5"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--victim", choices=KILLS, default="server")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--most-s", type=float, default=10.0, help="most seconds from a step to the next kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expected", type=Path, help="folder of a run that nobody disturbed; else one is made")
    parser.add_argument("--serve-cluster", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_cluster:
        serve_cluster(options.serve_cluster)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="launch-kills-"))
    arguments = arguments_of(folder, options)
    with environment_of(folder, options) as (environment, cluster):
        expected = options.expected or undisturbed(folder / "calm", environment, arguments)
        with Run(folder / "run", environment, arguments) as run:
            is_kept = kill_again_and_again(run, options, cluster)
            code = run.driver.wait(1800)
            time.sleep(2)
            left = run.processes()
    row = {"exit status": code, "processes left": len(left)} | compare(run.run_folder, expected)
    print(json.dumps(row), flush=True)
    is_whole = row["each step once"] and not (row["prompts lost"] or row["prompts twice"])
    return 0 if is_kept and is_whole and not (code or left) else 1


def undisturbed(folder: Path, environment: dict[str, str], arguments: list[str]) -> Path:
    """Return the run folder of a run that nobody disturbs."""
    with Run(folder, environment, arguments) as calm:
        if calm.driver.wait(1800):
            raise RuntimeError(calm.log.read_text()[-4000:])
    print(json.dumps({"undisturbed": str(calm.run_folder), "steps": calm.num_steps()}), flush=True)
    return calm.run_folder


def kill_again_and_again(run: Run, options: argparse.Namespace, cluster: Cluster | None) -> bool:
    """Kill at random times until there were enough kills or the run has ended; return whether promises were kept."""
    chosen, num_kills, is_kept = random.Random(options.seed), 0, True
    run.wait_for("the start", run.is_whole)
    run.wait_for("a checkpoint", lambda: any((run.run_folder / "checkpoints").glob("step-*")))
    while num_kills < options.kills and run.driver.poll() is None:
        began = time.time()
        with contextlib.suppress(Finished):
            run.wait_for("a step", lambda began=began: run.has_trained_since(began))
        time.sleep(chosen.uniform(0.0, options.most_s))
        if not run.is_whole():
            continue
        step = run.num_steps()
        num_kills += 1
        try:
            row = KILLS[options.victim](run, chosen, cluster)
        except Finished:  # before the kill, or on what was left
            row = {"the run ended first": True, "is kept": True}
        is_kept &= row["is kept"]
        print(json.dumps({"kill": num_kills, "of": options.victim, "at step": step} | row), flush=True)
    return is_kept


if __name__ == "__main__":
    sys.exit(main())
