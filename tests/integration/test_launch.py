"""``rlplug launch`` on this host: the same run as under torchrun, and what its command line says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import ROOT, SMALL, Job, run_job
from doc_engine import write_engine
from forked import free_port

from rlplug.observability.metrics_log import read_metrics

MODEL = ROOT / "tests/model"
ENGINE = ["--model.rollout", "launched_engine.LaunchedRollout", "--trainer.devices", "2"]
OPTIONS = [*SMALL[1:], *ENGINE, "--model.num_steps", "4", "--checkpoint.every_n_steps", "1"]
COMPARED = ("loss", "policy/grad_norm", "policy/entropy", "reward/mean", "completion/length_mean", "mismatch/mean")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder / "engine"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MY_ENGINE_KEY": "a-key"}


@pytest.fixture(scope="module")
def launch_file(folder: Path) -> Path:
    command = write_engine(folder / "engine", MODEL)
    launch = {"servers": {"command": command, "count": 2, "gpus": 0}, "grace_s": 60}
    file = folder / "launch.yaml"
    file.write_text(yaml.safe_dump({"launch": launch}))
    return file


@pytest.fixture(scope="module")
def urls(folder: Path, environment: dict[str, str], launch_file: Path) -> Iterator[list[str]]:
    """Servers that nobody launched, for torchrun."""
    command = yaml.safe_load(launch_file.read_text())["launch"]["servers"]["command"]
    ports = [free_port() for _ in range(2)]
    servers = [subprocess.Popen(command.format(host="127.0.0.1", port=port).split(), env=environment) for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    deadline = time.monotonic() + 120
    for url in urls:
        while not is_healthy(url):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    yield urls
    for server in servers:
        server.kill()
        server.wait()


def is_healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def rows(run_folder: Path) -> list[dict[str, float]]:
    return read_metrics(run_folder / "metrics.jsonl")


@pytest.mark.nightly
def test_launched_run_is_the_one_of_torchrun(
    folder: Path, environment: dict[str, str], launch_file: Path, urls: list[str]
) -> None:
    launch = [sys.executable, "-m", "rlplug", "launch", "-c", str(launch_file), *OPTIONS]
    output = run([*launch, "--run.dir", str(folder / "launched")], environment)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rlplug"]
    given = ["--model.rollout.init_args.urls", json.dumps(urls), "--run.dir", str(folder / "torchrun")]
    run([*torchrun, "fit", *OPTIONS, *given], environment)

    launched, expected = rows(folder / "launched/001"), rows(folder / "torchrun/001")
    assert len(launched) == len(expected) == 4
    for name in COMPARED:
        # which requests a server computes together depends on when they arrive, and rounds its logprobs
        atol = 1e-6 if name == "mismatch/mean" else 0
        assert [row[name] for row in launched] == pytest.approx([row[name] for row in expected], rel=0, abs=atol), name
    assert sorted(path.name for path in (folder / "launched/001/launch").glob("*.log")) == [
        *("server-0.log", "server-1.log", "trainer-0.log"),
    ]
    assert "placement by Local" in output
    shown = run([sys.executable, "-m", "rlplug", "launch", "--status", str(folder / "launched/001")], environment)
    assert "finished" in shown


@pytest.mark.nightly
def test_terminated_run_saves_and_goes_on_where_it_was(
    folder: Path, environment: dict[str, str], launch_file: Path
) -> None:
    runs = folder / "terminated"
    launch = [sys.executable, "-m", "rlplug", "launch"]
    first = [*launch, "-c", str(launch_file), *OPTIONS, "--checkpoint.every_n_steps", "100", "--run.dir", str(runs)]
    with subprocess.Popen(first, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "step 1/4" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
    assert process.returncode == 143, rest
    assert list((runs / "001/checkpoints").glob("step-*")), rest
    run([*launch, "--resume", str(runs / "001")], environment)
    assert [row["step"] for row in rows(runs / "001")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--launcher", "slurm", "--dry-run"], 0, "#SBATCH --nodes=1"),
        pytest.param(["--dry-run"], 0, "trainer 0", marks=pytest.mark.nightly),
        (["--launcher", "slurn"], 2, "'Slurn' is not a known launcher. Did you mean 'Slurm'?"),
        pytest.param(["--launch.max_restart", "1"], 2, "no key 'launch.max_restart'", marks=pytest.mark.nightly),
        pytest.param(["--trainer.num_nodes", "2"], 2, "the launcher Local has one node", marks=pytest.mark.nightly),
        (["--launch.servers", "{command: 'x {port}'}"], 2, "HFRollout, which takes no servers"),
    ],
)
def test_command_line(tmp_path: Path, options: list[str], code: int, expected: str) -> None:
    job = Job(["launch", *SMALL[1:], "--run.dir", str(tmp_path / "runs"), *options])
    result: Any = run_job(job, tmp_path / "log")
    assert result.exit_code == code, result.output
    assert expected in result.message
    assert not (tmp_path / "runs").exists(), "nothing is started"
