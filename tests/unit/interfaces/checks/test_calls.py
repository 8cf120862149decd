"""The names of plugins' calls, in errors and while they run."""

from __future__ import annotations

import re

import pytest
from unit.interfaces.checks.seam_cases import Scripted, run_loop

from rlplug.interfaces.checks.calls import PluginCall, failed_call, running_call


def test_an_exception_says_whose_it_is() -> None:
    def fail() -> None:
        raise KeyError("x0/1/0/0")

    try:
        run_loop(Scripted(lambda good: fail()))
    except KeyError as error:
        call = failed_call(error)
    assert str(call).startswith("Scripted.generate in ")
    with pytest.raises(ZeroDivisionError) as of_core:
        1 / 0  # noqa: B018
    assert failed_call(of_core.value) is None


def test_a_call_that_runs_has_a_name() -> None:
    seen = []
    run_loop(Scripted(lambda good: seen.append(running_call(__import__("sys")._getframe())) or good))
    assert str(seen[0]).startswith("Scripted.generate in ")


def test_the_distribution_of_a_plugin_is_named() -> None:
    from rlplug_algos.grpo import GRPO

    assert re.fullmatch(r"GRPO\.loss of rlplug-algos [\w.]+", str(PluginCall(GRPO(), "loss")))
