"""What the kit takes for a change of the trainer's process, beside the faults of engines."""

from __future__ import annotations

import builtins
import functools
import gc
import os
import random
import sys
from collections.abc import Callable

import numpy
import pytest
import torch
from rlplug_devkit.process_state import (
    changes_since,
    generator_states,
    moved,
    new_objects_alone,
    num_alive,
    process_state,
)
from torch.autograd.graph import saved_tensors_hooks


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


@pytest.mark.parametrize(
    ("name", "draw"),
    [("random", random.random), ("numpy.random", numpy.random.rand), ("torch", lambda: torch.rand(1))],
)
def test_a_single_draw_of_a_global_generator_is_seen(name: str, draw: Callable[[], object]) -> None:
    """Would miss a state without the place among the numbers that are drawn already."""
    draw()  # the first one after a seed makes all numbers anew
    before = generator_states()
    draw()
    assert moved(before) == {name}


def test_changes_below_python_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would miss a mask or a mode that is read in a way that does not show it."""
    mask = os.umask(0o022)
    hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    before = process_state()
    try:
        os.umask(0o077)
        torch.set_flush_denormal(True)
        hooks.__enter__()  # type: ignore[no-untyped-call]
        monkeypatch.setattr(builtins, "__import__", functools.partial(builtins.__import__))
        changes = changes_since(before)
    finally:
        hooks.__exit__()
        monkeypatch.undo()
        torch.set_flush_denormal(False)
        os.umask(mask)
    assert changes == {
        "the umask": "0022 became 0077",
        "torch's denormal numbers": "False became True",
        "torch's hooks of saved tensors": "False became True",
        "built-in functions": "__import__",
    }


def test_objects_are_counted_that_are_made_meanwhile_and_kept() -> None:
    """Would miss cycles that are no longer used, or what stays frozen behind the body."""
    kept = []
    num_frozen = gc.get_freeze_count()
    with new_objects_alone():
        assert num_alive((ValueError,)) == 0
        for _ in range(3):
            error = ValueError()
            error.__cause__ = error
        kept.append(error)
        del error
        assert num_alive((ValueError,)) == 1
    assert gc.get_freeze_count() == num_frozen
