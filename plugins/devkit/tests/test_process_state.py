"""What the kit takes for a change of the trainer's process, beside the faults of engines."""

from __future__ import annotations

import sys

import pytest
from rlplug_devkit.process_state import changes_since, process_state


def test_what_others_do_once_in_a_process_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setuptools appends its packages at its first import, and torch's compiler sets variables when it first runs."""
    before = process_state()
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "1")
    monkeypatch.setattr(sys, "path", [*sys.path, "/site-packages/setuptools/_vendor"])
    assert changes_since(before) == {}
    monkeypatch.setattr(sys, "path", [*sys.path, "/site-packages/other/_vendor"])
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert changes_since(before) == {
        "environment variables": "TORCHINDUCTOR_COMPILE_THREADS",
        "sys.path": "'/site-packages/other/_vendor'",
    }
