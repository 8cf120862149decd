"""What ``--resume`` makes of a command line."""

from __future__ import annotations

import os

import pytest
import yaml

from rlplug.cli.configuration.resume import check_checkpoint, config_of, read_config, with_resume
from rlplug.errors import ConfigError

CONFIG = {
    "seed_everything": 0,
    "run": {"dir": "runs/a"},
    "model": {
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.001}},
        "rewards": [{"class_path": "ExactMatch"}],
        "lr_scheduler": None,
    },
    "trainer": {"devices": 1},
    "data": {"seed": 0},
    "checkpoint": {"keep_last": 2},
}


@pytest.fixture
def run_dir(tmp_path):
    for step in (2, 4):
        folder = tmp_path / "001" / "checkpoints" / f"step-0000000{step}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.dump(CONFIG))
    (tmp_path / "001" / "config.yaml").write_text(yaml.dump(CONFIG))
    return tmp_path / "001"


@pytest.mark.parametrize("written", ["--resume RUN --a 1", "--a 1 --resume RUN", "--resume=RUN --a 1"])
@pytest.mark.parametrize("checkpoint", ["", "--ckpt_path other", "--ckpt_path=other"])
def test_the_newest_checkpoint_unless_another_is_named(run_dir, written, checkpoint):
    line = f"fit {written} {checkpoint}".replace("RUN", str(run_dir)).split()
    chosen = "other" if checkpoint else str(run_dir / "checkpoints" / "step-00000004")
    expected = ["fit", "--config", str(run_dir / "config.yaml"), "--ckpt_path", chosen, "--a", "1"]
    assert with_resume(line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--resume", "needs the folder of one run"),
        ("--resume --model.num_steps 3", "needs the folder of one run"),
        ("--resume=", "needs the folder of one run"),
        ("--resume RUN --resume RUN", "needs the folder of one run"),
        ("--resume RUN/absent", "this is not the folder of a run"),
        ("--resume RUN/config.yaml", "this is not the folder of a run"),
        ("--resume RUN --ckpt_path newest-whole", "each of its checkpoints is damaged"),
        ("--ckpt_path newest-whole", "name the run with --resume RUN"),
    ],
)
def test_lines_that_are_refused(run_dir, line, message):
    with pytest.raises(ConfigError, match=message):
        with_resume(["fit", *line.replace("RUN", str(run_dir)).split()])


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"\xff\xfe", b"a: [", b"- 1", b"[" * 3000, b"model: {}", None])
def test_a_damaged_configuration_names_its_copy(run_dir, content):
    path = run_dir / "config.yaml"
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config.yaml cannot be read: .*cp {run_dir}/checkpoints/step-00000004/"):
        read_config(path)


@pytest.mark.parametrize("path", ["", "absent", "last", "RUN", "RUN/config.yaml", "x" * 5000, "a\0b", "https://a/b"])
def test_what_is_no_checkpoint_is_refused(run_dir, path):
    with pytest.raises(ConfigError, match="Name one, such as runs/quickstart/001/checkpoints/step-00000050"):
        check_checkpoint(path.replace("RUN", str(run_dir)))


def test_the_configuration_of_a_checkpoint(run_dir, tmp_path):
    assert config_of(run_dir / "checkpoints" / "step-00000004") == CONFIG
    assert config_of(tmp_path) == {}  # of a run from Python


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_configuration_that_is_no_text_is_refused_at_once(tmp_path, kind):
    """Catches a resume that waits for ever at a pipe, or holds a file that takes no room on its disk."""
    path = tmp_path / "config.yaml"
    os.mkfifo(path) if kind == "pipe" else [path.touch(), os.truncate(path, 1 << 40)]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(path)
