"""Isolation of calls: what a call tries in vain, as root and as an ordinary user, with and without namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile_tools
import pytest
from hostile_tools import ATTEMPTS
from rlplug_sandbox import sandbox_isolation

TESTS = Path(__file__).parent
USER = 65534


def others_may_run(file: Path) -> bool:
    return all(path.stat().st_mode & 0o5 for path in [file, *file.parents])


def ordinary_python() -> str:
    """Return a Python of this version that every user may run, below ``/root`` there is none."""
    candidates = [Path(sys.executable).resolve(), Path(f"/usr/bin/python3.{sys.version_info.minor}").resolve()]
    found = [path for path in candidates if path.exists() and others_may_run(path)]
    if not found:
        pytest.skip("no Python that an ordinary user may run")
    return str(found[0])


def run(network: str, as_user: bool) -> dict[str, Any]:
    python, prefix = sys.executable, []
    if as_user and os.geteuid() == 0:
        python = ordinary_python()
        prefix = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    paths = [str(TESTS), *(path for path in sys.path if path)]
    done = subprocess.run(
        [*prefix, python, hostile_tools.__file__, network],
        env={**os.environ, "PYTHONPATH": ":".join(paths), "HOME": "/tmp", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("the packages are not readable by an ordinary user")
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("as_user", [False, True])
@pytest.mark.parametrize("network", ["network", "alone"])
def test_a_call_reaches_neither_the_trainer_nor_memory_without_a_limit(network: str, as_user: bool) -> None:
    if not as_user and os.geteuid() != 0:
        pytest.skip("needs root")
    result = run(network, as_user)
    has_namespaces = "see no process" in result["isolation"]
    if as_user and not has_namespaces:
        assert "without isolation" in result["isolation"]
        pytest.skip(f"no user namespaces here: {result['isolation']}")
    possible = {name for name, outcome in result["outcomes"].items() if outcome == "possible"}
    assert possible == ({"open a socket"} if network == "network" else set())
    assert result["outcomes"].keys() == ATTEMPTS.keys()
    assert ("network" in result["isolation"]) == (network == "network")
    if has_namespaces:
        assert result["hoards"] == ["[0, 8]", "[0, 8]"]  # 64 MiB each, and nothing is left of the first


def test_the_filter_knows_every_call_on_both_machines() -> None:
    for column in (0, 1):
        numbers = [pair[column] for pair in (sandbox_isolation.REFUSED | sandbox_isolation.NETWORK).values()]
        assert len(set(numbers)) == len(numbers)
