"""What ``--resume`` makes of a command line, and what it says or refuses of a changed configuration."""

from __future__ import annotations

import pytest
import yaml

from rlplug.cli.configuration.resume import changes_since, check_checkpoint, read_config, with_resume
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


def changed(**values):
    """Return the configuration with other values; ``__`` in a name stands for a dot."""
    config = yaml.safe_load(yaml.dump(CONFIG))
    for name, value in values.items():
        *parents, last = name.split("__")
        part = config
        for parent in parents:
            part = part[parent]
        part[last] = value
    return yaml.dump(config)


def test_changes_are_said(run_dir):
    """It catches an option that is taken, or left, without a word."""
    checkpoint = run_dir / "checkpoints" / "step-00000004"
    assert changes_since(checkpoint, yaml.dump(CONFIG)).lines == []
    new = changed(
        model__optimizer__init_args={"lr": 0.01, "eps": 1}, model__rewards=[{"class_path": "Other"}], more="x" * 99
    )
    changes = changes_since(checkpoint, new)
    assert changes.lines == [
        "changed since the checkpoint:",
        "  model.optimizer.init_args.eps: not set -> 1",
        "  model.optimizer.init_args.lr: 0.001 -> 0.01",
        "  model.rewards.0.class_path: ExactMatch -> Other",
        f"  more: not set -> {'x' * 57}...",
    ]
    assert changes.has_optimizer_options
    assert not changes_since(checkpoint, changed(more=1)).has_optimizer_options
    assert changes_since(checkpoint, changed(model__lr_scheduler={"class_path": "Cosine"})).has_optimizer_options
    assert len(changes_since(checkpoint, changed(more=dict.fromkeys(range(99), 1))).lines) == 22


@pytest.mark.parametrize("key", ["seed_everything", "run.dir", "model.optimizer.class_path"])
def test_what_a_resumed_run_cannot_change_is_refused(run_dir, tmp_path, key):
    checkpoint = run_dir / "checkpoints" / "step-00000004"
    new = changed(**{key.replace(".", "__"): "new"})
    with pytest.raises(ConfigError, match=rf"^{key} is new, and .* in the checkpoint .*: this cannot change"):
        changes_since(checkpoint, new)
    elsewhere = checkpoint.rename(tmp_path / "elsewhere")  # from which a run in a new folder starts
    if key == "run.dir":
        assert changes_since(elsewhere, new).values == {key: ("runs/a", "new")}
