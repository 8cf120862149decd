"""All files of a run go through one writer, which follows no link: a stranger's run may hold links of any name."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributions import ROOT

from rlplug.distributed.child_process import ChildProcess
from rlplug.distributed.durable_files import (
    FolderLock,
    RowFile,
    own_bytes,
    own_file,
    require_readable,
    whole_lines,
    write_file,
)
from rlplug.errors import RunError

WRITERS: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: write_file(path, "theirs"),
    "rows": lambda path: RowFile(path).append("theirs"),
    "lock": lambda path: FolderLock(path.parent),
    "log": lambda path: ChildProcess(["echo", "theirs"], log=path).wait(),
}


@pytest.mark.parametrize("what", WRITERS)
@pytest.mark.parametrize("suffix", ["", ".partial", ".tmp"])
def test_no_writer_follows_a_link(tmp_path: Path, what: str, suffix: str) -> None:
    """Catches a writer through which a run that somebody sends overwrites a file of its reader."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.write_text("mine")
    run.mkdir()
    path = run / "run.lock"
    (run / f"run.lock{suffix}").symlink_to(mine)
    try:
        WRITERS[what](path)
    except (OSError, RunError):
        assert not suffix
    assert mine.read_text() == "mine"
    assert what != "replaced" or (path.read_text() == "theirs" and not path.is_symlink())


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """Catches a reader that waits for ever at a pipe, or follows a link."""
    path = tmp_path / "config.yaml"
    {"pipe": os.mkfifo, "link": lambda at: at.symlink_to("/etc/passwd"), "folder": Path.mkdir}[kind](path)
    with pytest.raises(RunError, match="cannot be read"):
        require_readable([path])
    with pytest.raises(OSError, match=r"link|regular|directory"):
        os.close(own_file(str(path), os.O_RDWR))


def test_a_file_of_zeros_is_not_read_whole(tmp_path: Path) -> None:
    """Catches a reader that holds a terabyte, which takes no room in an archive or on a disk."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    os.truncate(path, 1 << 40)
    assert list(whole_lines(path)) == [{"step": 1}]
    with pytest.raises(ValueError, match="16,777,216 bytes"):
        own_bytes(path)


READERS = ("cli", "recording", "distributed")
READERS_OF_PLUGINS = ("watch", "eval", "launch")
READ_OTHERWISE = {
    "rlplug/cli/configuration/early_checks.py": 1,  # this package's
    "rlplug/cli/configuration/trainer_options.py": 1,
    "rlplug/cli/find_commands.py": 1,
    "rlplug/recording/run_record.py": 2,  # a distribution's
    "rlplug/recording/changes.py": 1,
    "rlplug/distributed/checkpoints/resumed_files.py": 1,
    "plugins/watch/src/rlplug_watch/page/server.py": 1,
    "plugins/watch/src/rlplug_watch/loggers/prometheus.py": 1,
    "plugins/watch/src/rlplug_watch/loggers/prometheus_exposition.py": 1,
    "plugins/watch/src/rlplug_watch/report_writer.py": 1,
}
"""Reads of whole files that are not by ``own_bytes``, by their number in each file."""


def test_no_file_of_a_run_is_read_otherwise() -> None:
    """Catches a new reader that waits at a pipe, follows a link or has no bound: use ``own_bytes``, or say why not."""
    found = {}
    folders = [f"rlplug/{name}" for name in READERS] + [f"plugins/{name}/src" for name in READERS_OF_PLUGINS]
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        if number := sum(node.attr in ("read_text", "read_bytes") for node in calls):
            found[str(path.relative_to(ROOT))] = number
    assert found == READ_OTHERWISE


# ---- no other writers -----------------------------------------------------------------------------------------------

OTHERS = {
    # in folders that the same process has just made
    "rlplug/models/export.py": 1,
    "plugins/devkit/src/rlplug_devkit/models.py": 1,
    "plugins/devkit/src/rlplug_devkit/tasks/tiny_run.py": 2,
    "plugins/devkit/src/rlplug_devkit/optimizations/bench.py": 1,
    "plugins/devkit/src/rlplug_devkit/trainers/bench.py": 1,
    "plugins/devkit/src/rlplug_devkit/check/runs.py": 3,
    "plugins/devkit/src/rlplug_devkit/check/results.py": 1,
    "plugins/plan/src/rlplug_plan/stand_ins.py": 3,
    "plugins/rollout_sglang/src/rlplug_rollout_sglang/server.py": 1,
    # a new plugin, and files that the command line names
    "plugins/devkit/src/rlplug_devkit/new_plugin/rendering.py": 1,
    "plugins/devkit/src/rlplug_devkit/certify/command.py": 1,
    "plugins/devkit/src/rlplug_devkit/check/__init__.py": 1,
    "plugins/migrate/src/rlplug_migrate/command.py": 1,
    "plugins/plan/src/rlplug_plan/overlay.py": 2,
    # of the system, pipes and file descriptors
    "plugins/envs/src/rlplug_envs/hosted/server.py": 1,
    "plugins/sandbox/src/rlplug_sandbox/sandbox_isolation.py": 1,
    "plugins/sandbox/src/rlplug_sandbox/sandbox_process.py": 1,
    "plugins/sandbox/src/rlplug_sandbox/template_renderer.py": 1,
    "plugins/devkit/src/rlplug_devkit/other_process.py": 3,
    "plugins/rewards/src/rlplug_rewards/code/code_program.py": 1,
    "plugins/rewards/src/rlplug_rewards/code/code_checker.py": 2,
    "plugins/watch/src/rlplug_watch/loggers/prometheus.py": 1,
    "rlplug/distributed/child_process.py": 1,
}
"""Writers that are not the one of ``durable_files``, by their number in each file, and why they may be others."""


def _writers(tree: ast.AST) -> Iterator[str]:
    """Yield calls that write a file by its name: ``write_text``, and ``open`` with a mode, without ``own_file``."""
    partial = {"partial", "kept"}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = call.func.value if isinstance(call.func, ast.Attribute) else (call.args[0] if call.args else None)
        is_partial = any(isinstance(each, ast.Name) and each.id in partial for each in (owner, *call.args[:1]))
        modes = [each.value for each in call.args[:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        writes = name == "open" and any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)
        has_opener = any(word.arg == "opener" for word in call.keywords)
        if not is_partial and not has_opener and (name in ("write_text", "write_bytes", "fdopen") or writes):
            yield ast.unparse(call)


def test_a_configuration_with_a_key_is_for_its_owner_wherever_it_is_written() -> None:
    """Catches a new copy of a configuration that all users of a host may read, with a logger's key in clear."""
    calls = []
    for path in [*ROOT.glob("rlplug/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if "write_file(" in text else iter(())
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            if getattr(call.func, "id", "") == "write_file" and "config" in ast.unparse(call.args[1]):
                calls.append((path.name, ast.unparse(call)))
    without = [name for name, call in calls if "has_key(" not in call]
    assert without == ["writer.py"], "a checkpoint's folder is its owner's as a whole"
    assert len(calls) >= 4


def test_no_file_is_written_otherwise() -> None:
    """Catches a new writer that follows links: use ``write_file``, ``replaced`` or ``own_file``, or say why not."""
    found = {}
    for path in [*ROOT.glob("rlplug/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        if path.name != "durable_files.py" and (calls := list(_writers(ast.parse(path.read_text())))):
            found[str(path.relative_to(ROOT))] = calls
    assert {path: len(calls) for path, calls in found.items()} == OTHERS, json.dumps(found, indent=1)
