"""Files that are replaced or appended as one, rows that are cut back, and folders with one owner."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from forked import ForkedProcess
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rlplug.distributed import durable_files
from rlplug.distributed.checkpoints.resumed_files import cut_back_lines, set_exports_aside
from rlplug.distributed.durable_files import (
    FolderLock,
    RowFile,
    new_numbered_folder,
    of_user,
    replace_folder,
    replaced,
    write_file,
)
from rlplug.errors import RunError


def replace(path: Path, raises: bool) -> None:
    with replaced(path) as partial:
        partial.write_text("new")
        if raises:
            raise ZeroDivisionError


def test_weights_can_be_read_by_whom_the_umask_lets(tmp_path):
    """Catches weights of mode 0600, as safetensors writes them, which a serving account cannot read."""
    before = os.umask(0o027)
    try:
        with of_user(tmp_path / "model.safetensors"):
            save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("fails", ["open", "fsync", "rename", "body"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, fails):
    """It catches a file that is opened for writing in place, or whose remains stay."""
    path = tmp_path / "run.json"
    write_file(path, "old")
    full = OSError(errno.ENOSPC, "No space left on device")

    def raise_full(*arguments, **keywords):
        raise full

    if fails == "open":
        monkeypatch.setattr(Path, "write_text", raise_full)
    elif fails == "fsync":
        monkeypatch.setattr(os, "fsync", raise_full)
    elif fails == "rename":
        monkeypatch.setattr(Path, "replace", raise_full)
    with pytest.raises(RunError if fails != "body" else ZeroDivisionError) as caught:
        replace(path, fails == "body")
    if fails != "body":
        assert f"{path} cannot be written: No space left on device (" in str(caught.value)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


@contextmanager
def limited_file_size(limit):
    """Let the disk take no file of more than ``limit`` bytes."""
    former, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)


def test_rows_that_the_disk_refuses_leave_none_of_them(tmp_path, monkeypatch):
    file = RowFile(tmp_path / "samples.jsonl")
    file.append("first\n")
    with limited_file_size(9), pytest.raises(RunError, match=r"samples.jsonl cannot be written: File too large"):
        file.append("second\n")
    assert file.path.read_text() == "first\n"


def test_rows_are_synced_seldom_and_when_asked(tmp_path, monkeypatch):
    """It catches a sync for each row, which takes milliseconds, and rows that no sync follows."""
    synced = []
    monkeypatch.setattr(durable_files, "sync", synced.append)
    file = RowFile(tmp_path / "samples.jsonl")
    for number in range(5):
        file.append(f"{number}\n")
    assert synced == [file.path]
    file.sync()
    file.sync()
    assert synced == [file.path] * 2
    monkeypatch.setattr(durable_files, "SYNC_S", 0.0)
    file.append("later\n")
    assert synced == [file.path] * 3


def test_a_folder_is_replaced_by_a_complete_one(tmp_path):
    for content in ("old", "new"):
        (tmp_path / "policy.partial").mkdir()
        (tmp_path / "policy.partial" / "weights").write_text(content)
        replace_folder(tmp_path / "policy.partial", tmp_path / "policy")
    assert (tmp_path / "policy" / "weights").read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["policy"]


LINES = [json.dumps({"step": step, "phase": "train", "text": "\n\0é"}).encode() + b"\n" for step in (1, 1, 2, 3, 4)]
TORN = st.one_of(st.binary(max_size=60), st.integers(0, 2000).map(bytes), st.sampled_from([b"[1]\n", b"{}\n", b"null"]))


@settings(max_examples=150)
@given(end=st.integers(0, sum(map(len, LINES))), tail=TORN, step=st.integers(-1, 5), flipped=st.integers(0, 400))
def test_any_end_of_a_file_of_rows_is_cut_back(tmp_path_factory, end, tail, step, flipped):
    """It catches rows that are lost or kept wrongly, or a tail that ends the run."""
    path = tmp_path_factory.mktemp("rows") / "samples.jsonl"
    data = bytearray(b"".join(LINES)[:end] + tail)
    if flipped < len(data):
        data[flipped] ^= 16
    path.write_bytes(data)

    said = cut_back_lines(path, step, lambda record: True)

    kept = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    assert all(json.loads(line)["step"] <= step for line in kept)
    missing = set(range(1, step + 1)) - {json.loads(line)["step"] for line in kept}
    assert any("are missing" in line for line in said) == bool(missing)
    assert cut_back_lines(path, step) == []  # what is left is whole
    untouched = [line for line in LINES if line in bytes(data).splitlines(keepends=True)]
    assert {line for line in untouched if json.loads(line)["step"] <= step} <= set(kept)
    assert not path.with_name("samples.jsonl.partial").exists()


def test_what_is_lost_is_said(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"".join(LINES[:3]) + b'{"step": 3, "ph')
    assert cut_back_lines(path, 6, lambda record: record["phase"] == "train") == [
        f"{path}: 1 damaged line was removed.",
        f"{path}: rows of step 3-6 are missing, which the run cannot write again.",
    ]
    assert path.read_bytes() == b"".join(LINES[:3])


WORKER = """
import sys, time
from pathlib import Path
from rlplug.distributed.durable_files import FolderLock, new_numbered_folder
folder = Path(sys.argv[1])
while not (folder / "go").exists():
    time.sleep(0.001)
path = new_numbered_folder(folder / "runs")
lock = FolderLock(path)
print(path.name, flush=True)
time.sleep(60)
"""


def test_sixteen_starts_get_sixteen_folders_and_lock_them(tmp_path):
    """It catches a number that two runs take, and a folder that a second run may write to."""
    processes = [ForkedProcess([sys.executable, "-c", WORKER, tmp_path]) for _ in range(16)]
    try:
        (tmp_path / "go").touch()
        while not all(process.stdout.endswith("\n") for process in processes):
            assert all(process.poll() is None for process in processes), [process.stdout for process in processes]
        names = sorted(process.stdout.strip() for process in processes)
        assert names == [f"{number:03d}" for number in range(1, 17)]
        with pytest.raises(RunError, match=r"001 belongs to a run that is still going on \('process \d+ on .*'\)"):
            FolderLock(tmp_path / "runs" / "001")
    finally:
        for process in processes:
            process.kill()
    FolderLock(tmp_path / "runs" / "001").close()  # however its owner ended


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(durable_files.fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match="this file system has no locks"):
        FolderLock(tmp_path)


@pytest.mark.parametrize("name", ["²", "a", "0x1", "7.5"])
def test_other_names_among_the_numbers(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / "007").touch()
    assert new_numbered_folder(tmp_path) == tmp_path / "008"


def test_a_parent_that_is_a_file_is_an_error_with_its_name(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(RunError, match="runs/001 cannot be written: "):
        new_numbered_folder(tmp_path / "runs")


def test_exports_of_the_former_end_say_their_step(tmp_path):
    """Alone catches a resumed run whose former `policy/` commands take for the newest."""
    for step, text in ((4, "first"), (9, "second"), (9, "again")):
        (tmp_path / "policy").mkdir()
        (tmp_path / "policy" / "config.json").write_text(text)
        (said,) = set_exports_aside(tmp_path, step)
        assert f"of step {step} is now" in said
    assert set_exports_aside(tmp_path, 12) == []
    found = {path.name: (path / "config.json").read_text() for path in tmp_path.iterdir()}
    assert found == {"policy-step-00000004": "first", "policy-step-00000009": "again"}
