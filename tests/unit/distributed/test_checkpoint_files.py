"""Checkpoints that are damaged, foreign or hostile: one error that names the file, and no code of theirs runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from rlplug.distributed.checkpoints import writer
from rlplug.distributed.checkpoints.files import CONFIG_KEY, FileDigest, has_key, list_checkpoints
from rlplug.distributed.checkpoints.reader import find_damage, newest_whole, read_checkpoint, require_whole
from rlplug.distributed.checkpoints.resumed_files import set_aside_after
from rlplug.distributed.checkpoints.writer import ChecksumWriter, write_others
from rlplug.distributed.durable_files import write_file
from rlplug.errors import ConfigError, RunError


class Opens:
    """Something whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.6))
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(folder: Path, extra: object = None) -> Path:
    """Write a checkpoint; ``extra`` goes into the options of the optimizer."""
    model, optimizer = parts()
    folder.mkdir(parents=True)
    torch.save({"rlplug": {"rollout_step": 1}}, folder / "meta.pt")
    (folder / "config.yaml").write_text("model: {}\n")
    states = {"state_dict": get_model_state_dict(model), "optimizer_0": get_optimizer_state_dict(model, optimizer)}
    if extra is not None:
        states["optimizer_0"]["param_groups"][0]["betas"] = extra
    save(states, storage_writer=ChecksumWriter(folder), no_dist=True)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "run" / "checkpoints" / "step-00000001")


def seal(folder: Path) -> None:
    """Write the manifest that goes with the files of ``folder``, as somebody hostile would."""
    digests = {path.name: asdict(FileDigest.of(path)) for path in folder.iterdir() if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps({"files": digests}))


def test_what_is_written_is_read(whole):
    model, optimizer = nn.Linear(3, 2), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    expected, expected_optimizer = parts()

    assert find_damage(whole) is None
    assert read_checkpoint(whole, model, [optimizer]) == {"rlplug": {"rollout_step": 1}}
    assert torch.equal(model.weight, expected.weight)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    moments = [each.state_dict()["state"][0]["exp_avg"] for each in (optimizer, expected_optimizer)]
    assert torch.equal(*moments)


FILES = ("__0_0.distcp", ".metadata", "meta.pt", "config.yaml", "manifest.json")


@settings(max_examples=200)
@given(
    name=st.sampled_from(FILES),
    place=st.floats(0, 1, exclude_max=True),
    damage=st.sampled_from(["flip", "cut", "nul", "add"]),
    bit=st.integers(0, 7),
)
def test_any_changed_byte_of_any_file_is_found(whole, tmp_path_factory, name, place, damage, bit):
    """It catches a file that has no checksum, and a manifest that is believed."""
    folder = tmp_path_factory.mktemp("damaged") / "step-00000001"
    shutil.copytree(whole, folder)
    data = bytearray((folder / name).read_bytes())
    index = int(place * len(data))
    if damage == "flip":
        data[index] ^= 1 << bit
    else:
        end = {"cut": b"", "nul": bytes(len(data) - index), "add": bytes(data[index:]) + b"}"}[damage]
        data[index:] = end
    is_same = bytes(data) == (whole / name).read_bytes()
    (folder / name).write_bytes(data)

    found = find_damage(folder)

    if name == "manifest.json" and found is None:  # white space, or a key that nobody reads
        assert json.loads(data)["files"].keys() == json.loads((whole / name).read_bytes())["files"].keys()
    else:
        assert (found is None) == is_same
        assert is_same or name == "manifest.json" or found.startswith(name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "folder", "unreadable"])
def test_a_file_that_cannot_be_read_is_named(whole, tmp_path, name, damage):
    folder = tmp_path / "step-00000001"
    shutil.copytree(whole, folder)
    (folder / name).unlink()
    if damage == "folder":
        (folder / name).mkdir()
    elif damage == "unreadable":
        (folder / name).symlink_to(name)  # to itself, which root cannot read either
    assert name in str(find_damage(folder))


def test_ranks_share_the_files(whole, tmp_path):
    folder = tmp_path / "step-00000001"
    shutil.copytree(whole, folder)
    (folder / "meta.pt").write_bytes(b"")
    found = [find_damage(folder, rank, 3) for rank in range(3)]
    size = (whole / "meta.pt").stat().st_size
    assert [each for each in found if each] == [f"meta.pt has 0 bytes, and {size} were written"]


@pytest.mark.parametrize("place", ["metadata", "tensors", "others"])
def test_no_code_of_a_checkpoint_runs(tmp_path, place):
    """It catches a pickle that is read with all of Python's classes; the manifest is as it should be."""
    folder, made = tmp_path / "step-00000001", tmp_path / "made"
    write(folder, Opens(made) if place == "tensors" else None)
    if place == "metadata":
        found = FileSystemReader(folder).read_metadata()
        found.planner_data = Opens(made)
        (folder / ".metadata").write_bytes(pickle.dumps(found))
    elif place == "others":
        torch.save({"rlplug": Opens(made)}, folder / "meta.pt")
    seal(folder)
    made.unlink(missing_ok=True)
    assert find_damage(folder) is None

    model = nn.Linear(3, 2)
    with pytest.raises(RunError, match="cannot be loaded into this run"):
        read_checkpoint(folder, model, [torch.optim.AdamW(model.parameters())])
    assert not made.exists()


@pytest.mark.parametrize("module", ["os", "builtins", "torch", "torch.serialization", "pathlib"])
@pytest.mark.parametrize("name", ["system", "eval", "load", "PosixPath.home", "float32.__class__"])
def test_only_classes_of_such_a_file_are_unpickled(whole, tmp_path, module, name):
    folder = tmp_path / "step-00000001"
    shutil.copytree(whole, folder)
    strings = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)]
    (folder / ".metadata").write_bytes(b"\x80\x04" + b"".join(strings) + b"\x93.")  # a global, and the end
    with pytest.raises(
        RunError, match=f"names {module}.{name}|metadata is None"
    ):  # torch 2.11 hides what a reader says
        read_checkpoint(folder, nn.Linear(3, 2), [])


def test_another_model_is_one_message(whole):
    with pytest.raises(RunError, match=r"cannot be loaded into this run: .*[Ss]ize"):
        read_checkpoint(whole, nn.Linear(4, 2), [])


def test_what_is_not_accepted_overwrites_nothing(whole):
    model, seen = nn.Linear(3, 2), []
    before = model.weight.clone()

    def refuse(folder, others):
        seen.append((folder, others))
        raise ConfigError("of another trainer")

    with pytest.raises(ConfigError, match="of another trainer"):
        read_checkpoint(whole, model, [], refuse)
    assert seen == [(whole, {"rlplug": {"rollout_step": 1}})]
    assert torch.equal(model.weight, before)


def test_the_newest_whole_one_is_offered(whole, tmp_path):
    for step in (1, 2, 3):
        shutil.copytree(whole, tmp_path / "checkpoints" / f"step-{step:08d}")
    run = tmp_path / "checkpoints"
    (run / "step-00000003" / "meta.pt").write_bytes(b"")
    (run / "step-00000002" / "manifest.json").unlink()
    assert newest_whole(tmp_path) == run / "step-00000001"
    with pytest.raises(RunError, match=r"step-00000003 is damaged: meta.pt .*step-00000001 is whole: .*newest-whole"):
        require_whole(run / "step-00000003", [None, find_damage(run / "step-00000003")])
    (run / "step-00000001" / "meta.pt").unlink()
    with pytest.raises(RunError, match="no other checkpoint of this run that is whole"):
        require_whole(run / "step-00000003", ["meta.pt is absent"])


def test_later_checkpoints_go_aside_and_stay(tmp_path):
    """It catches a newest checkpoint that is not of what was trained last."""
    for expected in ("abandoned-1", "abandoned-2"):
        for step in (2, 4, 6):
            (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "metrics.jsonl").write_text("")
        aside = set_aside_after(tmp_path, 2, ["metrics.jsonl", "samples.jsonl"])
        assert aside == tmp_path / "checkpoints" / expected
        assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", "step-00000004", "step-00000006"]
        assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert set_aside_after(tmp_path, 2, []) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("api_key: abc", True), ("  comet_api_key: 'abc'", True), ("neptune_api_token: x", True), ("secret: x", True),
        ("tracking_uri: http://me:word@host", True), ("api_key: null", False), ("api_key: ${COMET}", False),
        ("api_key: '${COMET}'", False), ("api_key: ''", False), ("api_key_env: NAME", False), ("eos_token: x", False),
        ("max_new_tokens: 5", False), ("uri: http://host:80/a@b", False), ("hub_token:\n  x: 1", False),
    ],
)  # fmt: skip
def test_a_key_in_clear_is_for_its_owner_alone(config, expected, tmp_path, monkeypatch):
    """Catches a logger's key that all users of a host may read, and files of a team that nobody else can."""
    monkeypatch.setattr(writer.dist, "get_rank", lambda: 0)
    former = os.umask(0o022)
    try:
        write_file(tmp_path / "config.yaml", config, has_key(config))
        write_others({CONFIG_KEY: config}, tmp_path / "step")
    finally:
        os.umask(former)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("config.yaml", "step")]
    assert modes == ([0o600, 0o700] if expected else [0o644, 0o755])
    assert (tmp_path / "step" / "config.yaml").read_text() == (tmp_path / "config.yaml").read_text() == config
