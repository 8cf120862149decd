"""Each file of a run folder, damaged in each way: ``--resume`` says so in one message, or goes on exactly.

It catches a file that is read without a check, or rewritten before the run is accepted.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import SMALL, Job, Runs, samples
from test_resume import metrics

RUN = [*SMALL, "--model.num_steps", "3", "--checkpoint.every_n_steps", "1", "--model.batch.mini_batch_size", "8"]
CHECKPOINT = "checkpoints/step-00000003"
OF_CHECKPOINT = ("__0_0.distcp", ".metadata", "meta.pt", "config.yaml", "manifest.json")
FILES = (
    *(f"{CHECKPOINT}/{name}" for name in OF_CHECKPOINT),
    *("config.yaml", "run.json", "run.lock", "metrics.jsonl", "samples.jsonl", "reward_errors.jsonl"),
    *("checkpoints", CHECKPOINT, "policy", "policy/model.safetensors"),
)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = b"" if path.is_dir() or not path.exists() else path.read_bytes()
        remove(path)
        path.write_bytes(change(data))

    return damage


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :] if data else b"\4"


def make_folder(path: Path) -> None:
    remove(path)
    (path / "a folder").mkdir(parents=True)


def make_unreadable(path: Path) -> None:
    """Make a link to itself, which root cannot read either."""
    remove(path)
    path.symlink_to(path.name)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": remove,
    "empty": rewrite(lambda data: b""),
    "cut": rewrite(lambda data: data[: len(data) * 2 // 3]),
    "nul-filled": rewrite(lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2)),
    "one-bit": rewrite(flip),
    "folder": make_folder,
    "unreadable": make_unreadable,
}
CASES = [(file, damage) for file in FILES for damage in DAMAGES]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("damaged")
    jobs = {"three": Job([*RUN, "--run.dir", str(folder / "three")])}
    jobs["four"] = Job([*RUN, "--model.num_steps", "4", "--run.dir", str(folder / "four")])
    return Runs(jobs, folder)


@pytest.mark.parametrize(
    ("file", "damage"),
    samples(CASES, (f"{CHECKPOINT}/__0_0.distcp", "one-bit")),
)
def test_a_damaged_run_is_refused_with_one_message_or_goes_on_exactly(runs: Runs, file: str, damage: str) -> None:
    runs.ended("three")
    name = f"{file.replace('/', '-')}-{damage}"
    run_dir = runs.folder / name / "001"
    shutil.copytree(runs.folder / "three" / "001", run_dir)
    DAMAGES[damage](run_dir / file)
    config = (run_dir / "config.yaml").read_bytes() if (run_dir / "config.yaml").is_file() else None

    runs.jobs[name] = Job(["fit", "--resume", str(run_dir), "--model.num_steps", "4"])
    result = runs[name]

    assert "Traceback" not in result.output, result.output[-3000:]
    if result.exit_code == 0:
        runs.ended("four")
        whole = runs.folder / "four" / "001"
        weights = Path("policy") / "model.safetensors"
        is_same = (run_dir / weights).read_bytes() == (whole / weights).read_bytes()
        # a bit of config.yaml may be one of a value
        assert is_same or (file == "config.yaml" and result.output.count("->") > 1)
        assert metrics(run_dir)[-1] == metrics(whole)[-1] or not is_same
        assert not file.startswith(CHECKPOINT) or (damage == "missing" and file == CHECKPOINT)
    else:
        assert result.exit_code in (1, 2)
        assert result.output.count("rlplug: ") == 1
        assert Path(file).name in result.message or damage == "one-bit"  # of a key, which is named
        if config is not None:
            assert (run_dir / "config.yaml").read_bytes() == config
