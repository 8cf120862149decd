"""The command ``rlplug plugins``: what it shows, that nothing is cut, and its exit status."""

from __future__ import annotations

import json

import pytest
from distributions import all_distributions

from rlplug.cli.main import main

GOOD = """
from rlplug.interfaces import Optimization
from rlplug.plugin_manager import hookimpl

RLPLUG_API_VERSION = ">=1,<2"

class AnOptimizationWithALongName(Optimization):
    def effects(self):
        return []

@hookimpl
def rlplug_register_optimizations(registry):
    registry.add("optimizations", AnOptimizationWithALongName)

@hookimpl
def rlplug_after_update(metrics):
    pass
"""
NAMES = (
    *("rlplug loaded (rlplug ", "HFRollout", "MathVerify", "algos loaded (rlplug-algos ", "GRPO"),
    *("good loaded (acme-good-with-a-long-name 2.5, hook API >=1,<2)", "AnOptimizationWithALongName"),
    *("after_update, register_optimizations",),
)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [24, 80, 200])
def test_plugins_shows_all_and_cuts_nothing(install_plugin, monkeypatch, capsys, width):
    install_plugin("good", GOOD, distribution="acme-good-with-a-long-name")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["plugins"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    for name in NAMES:
        if width == 24:  # where a name is wider than its column, it goes on in the next line
            assert name.replace(" ", "") in "".join(shown.split())
        else:
            assert name in unwrapped(shown)


def test_failed_plugin_shows_its_file_and_reason_and_fails_the_command(install_plugin, monkeypatch, capsys):
    reason = "built for [torch 2.9], [/bold] not " + "this one " * 20
    file = install_plugin("broken", f"raise ImportError({reason!r})", distribution="acme-" + "very-" * 12 + "broken")
    install_plugin("good", GOOD)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plugins"]) == 1
    shown = capsys.readouterr().out
    assert f"file  {file}\n" in shown  # in one line, to be copied
    assert unwrapped(f"raised ImportError: {reason}.") in unwrapped(shown)
    assert "good loaded" in shown


def test_blocked_plugin_is_no_failure(install_plugin, capsys):
    install_plugin("broken", "import no_such_library")
    assert main(["plugins", "--block", "broken"]) == 0
    assert "broken blocked (acme-broken 2.5)" in capsys.readouterr().out


def test_plugins_that_contradict_each_other_are_shown(install_plugin, capsys):
    install_plugin("alpha", GOOD + "RLPLUG_BEFORE = ('beta',)")
    install_plugin("beta", GOOD + "RLPLUG_BEFORE = ('alpha',)")
    install_plugin("twin", GOOD, distribution="acme-one")
    install_plugin("twin", GOOD, distribution="acme-two")
    assert main(["plugins", "--json"]) == 1
    states = {record["distribution"]: record["state"] for record in json.loads(capsys.readouterr().out)}
    assert {states.pop(distribution.name) for distribution in all_distributions()} == {"loaded"}
    assert states == {"acme-alpha": "failed", "acme-beta": "failed", "acme-one": "loaded", "acme-two": "failed"}


def test_misspelled_block_is_a_usage_error(capsys):
    assert main(["plugins", "--block", "algo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlplug: cannot block 'algo': no plugin has that name. Did you mean 'algos'?")
