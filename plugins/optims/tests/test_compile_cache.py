"""Where compiled code is kept: which variables are set, whose win, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rlplug_optims.compile_cache import INDUCTOR, use_compile_cache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from rlplug.errors import ConfigError, RunError
from rlplug.recording.run_folder import DEFAULT_COMPILE_CACHE
from rlplug.rollout.hf_engine import HFRollout


class EngineWithCache(HFRollout):
    compile_cache_variables = {"SOME_ENGINE_CACHE": "engine/kernels"}  # noqa: RUF012 - of plugins, which may do that too


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "SOME_ENGINE_CACHE"):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
    monkeypatch.setenv(INDUCTOR, default_cache_dir())  # as torch's import leaves it


def test_the_folder_is_that_of_torch_triton_and_the_engine(tmp_path: Path) -> None:
    """Catches torch's own default, which its import writes into the environment, being taken for a user's."""
    note = use_compile_cache(str(tmp_path / "cache"), EngineWithCache())
    expected = {INDUCTOR: "inductor", "TRITON_CACHE_DIR": "triton", "SOME_ENGINE_CACHE": "engine/kernels"}
    assert {name: os.environ[name] for name in expected} == {
        name: str(tmp_path / "cache" / below) for name, below in expected.items()
    }
    assert all(Path(os.environ[name]).is_dir() for name in expected)
    assert note == f"compiled code is kept in {tmp_path / 'cache'} ({', '.join(expected)})"


def test_nobody_else_may_fill_the_folder(tmp_path: Path) -> None:
    """Catches folders with the umask of groups that share files: what is in them is executed."""
    former = os.umask(0o002)
    try:
        use_compile_cache(str(tmp_path / "home" / "cache"), HFRollout())
    finally:
        os.umask(former)
    folders = [folder for folder in tmp_path.rglob("*") if folder.is_dir()]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.parametrize("below", [".", "inductor"])
@pytest.mark.parametrize("change", ["mode", "owner"])
def test_a_folder_that_others_may_fill_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, change: str
) -> None:
    """Catches code of a neighbour, who made the folder first, being run as compiled code of one's own."""
    use_compile_cache(str(tmp_path / "cache"), HFRollout())
    folder = tmp_path / "cache" / below
    if change == "mode":
        folder.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv(INDUCTOR, default_cache_dir())
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    with pytest.raises(ConfigError, match=r"run\.compile_cache .* is another user's, or all may write to it"):
        use_compile_cache(str(tmp_path / "cache"), HFRollout())
    assert os.environ["TRITON_CACHE_DIR"] == ""


def test_variables_of_the_user_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    note = use_compile_cache(str(tmp_path), HFRollout())
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert (
        note == f"compiled code is kept in {tmp_path} ({INDUCTOR}); TRITON_CACHE_DIR of the environment is /elsewhere"
    )
    assert not (tmp_path / "triton").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = r"run\.compile_cache is \S+/file/cache, which cannot be used: .* Name a folder of your own, or set null"
    with pytest.raises(ConfigError, match=text):
        use_compile_cache(str(tmp_path / "file" / "cache"), HFRollout())
    assert os.environ[INDUCTOR] == default_cache_dir()


def test_the_default_is_no_hurdle_where_the_home_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers. Catches every run there being refused for a key that nobody set."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    note = use_compile_cache(DEFAULT_COMPILE_CACHE, HFRollout(), is_default=True)
    assert note is not None
    assert note.startswith("compiled code is not kept for later runs: run.compile_cache is ~/.cache/rlplug/compile: ")
    assert os.environ[INDUCTOR] == default_cache_dir()


@pytest.mark.parametrize("found", [["A"], {"A": "/absolute"}, {"A": "../outside"}, {"A=B": "folder"}, {"A": 1}])
def test_variables_of_an_engine_are_checked(found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineWithCache, "compile_cache_variables", found)
    with pytest.raises(RunError, match=r"EngineWithCache\.compile_cache_variables.* must "):
        use_compile_cache(str(tmp_path), EngineWithCache())
    assert not list(tmp_path.iterdir())
