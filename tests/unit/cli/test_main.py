"""The command line: what starts at once, help, completion, and the command ``rlplug plugins``."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from distributions import all_distributions
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.trainer import call

from rlplug.cli.configuration.short_forms import SHORT_KEYS
from rlplug.cli.main import main
from rlplug.cli.messages import explain_failure

GOOD = """
from rlplug.interfaces import Optimization
from rlplug.plugin_manager import hookimpl

RLPLUG_API_VERSION = ">=3,<4"

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
    *("good loaded (acme-good-with-a-long-name 2.5, hook API >=3,<4)", "AnOptimizationWithALongName"),
    *("after_update, register_optimizations",),
)


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [24, 80, 200])
def test_plugins_shows_all_and_cuts_nothing(install_plugin, monkeypatch, capsys, width):
    install_plugin("good", GOOD, distribution="acme-good-with-a-long-name")
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["plugins", "--check"]) == 0
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
    assert main(["plugins", "--check"]) == 1
    shown = capsys.readouterr().out
    assert f"file  {file}\n" in shown  # in one line, to be copied
    assert unwrapped(f"raised ImportError: {reason}.") in unwrapped(shown)
    assert "good loaded" in shown


def test_a_loaded_plugin_without_its_library_says_so(install_plugin, capsys):
    """Catches a check that calls a plugin fit for use when the engine that it drives is not installed."""
    install_plugin("engine", GOOD + 'RLPLUG_LIBRARIES = ("json", "no_such_engine")')
    assert main(["plugins", "--check"]) == 0
    assert "engine loaded; no_such_engine is not installed (acme-engine" in unwrapped(capsys.readouterr().out)


def test_verbose_shows_files_documentation_and_who_wraps_whom(install_plugin, capsys, tmp_path):
    wrapper = "from rlplug.plugin_manager import hookimpl\nRLPLUG_API_VERSION = '>=3,<4'\n@hookimpl(wrapper=True)\n"
    file = install_plugin("wraps", f"{wrapper}def rlplug_prepare_batch():\n    return (yield)\n")
    (metadata,) = file.parent.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text() + "Project-URL: Homepage, https://acme.example\n")
    assert main(["plugins", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"prepare_batch +wraps around rlplug", shown)
    assert unwrapped(str(file)) in unwrapped(shown)
    assert re.search(r"docs +https://acme\.example", shown)
    assert main(["plugins", "--verbose", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {plugin["docs"] for plugin in told["plugins"] if plugin["name"] == "wraps"} == {"https://acme.example"}
    assert [caller["plugin"] for caller in told["hooks"]["prepare_batch"]] == ["wraps", "rlplug"]


def test_costs_of_a_run_are_shown(tmp_path, capsys):
    cost = {"plugin": "watch", "hook": "after_rollout", "phase": "rewards", "calls": 3, "seconds": 0.25}
    (tmp_path / "run.json").write_text(json.dumps({"hook_costs": [cost]}))
    assert main(["plugins", "--run", str(tmp_path)]) == 0
    assert re.search(r"watch .* after_rollout .* rewards .* 3 .* 0\.250000", capsys.readouterr().out)
    for text in ("{}", "not json", '{"hook_costs": [1]}', '{"hook_costs": 5}'):
        (tmp_path / "run.json").write_text(text)
        assert main(["plugins", "--run", str(tmp_path)]) == 2
        assert "its run.json has no costs of hooks" in capsys.readouterr().err


def test_blocked_plugin_is_no_failure(install_plugin, capsys):
    install_plugin("broken", "import no_such_library")
    assert main(["plugins", "--check", "--block", "broken"]) == 0
    assert "broken blocked (acme-broken 2.5)" in capsys.readouterr().out


def test_plugins_that_contradict_each_other_are_shown(install_plugin, capsys):
    install_plugin("alpha", GOOD + "RLPLUG_BEFORE = ('beta',)")
    install_plugin("beta", GOOD + "RLPLUG_BEFORE = ('alpha',)")
    install_plugin("twin", GOOD, distribution="acme-one")
    install_plugin("twin", GOOD, distribution="acme-two")
    assert main(["plugins", "--check", "--json"]) == 1
    states = {record["distribution"]: record["state"] for record in json.loads(capsys.readouterr().out)}
    assert {states.pop(each.name) for each in all_distributions() if each.plugins or each.name == "rlplug"} == {
        "loaded"
    }
    assert states == {"acme-alpha": "failed", "acme-beta": "failed", "acme-one": "loaded", "acme-two": "failed"}


def test_plugins_are_listed_without_importing_one(install_plugin, capsys):
    """Catches a listing that imports, or that says of a plugin that it did not try that it loads."""
    install_plugin("broken", "raise ImportError('it was imported')", distribution="acme-broken")
    assert main(["plugins"]) == 0
    shown = unwrapped(capsys.readouterr().out)
    assert "broken installed (acme-broken 2.5)" in shown
    assert "algos installed (rlplug-algos" in shown
    assert "GRPO" in shown
    assert "rlplug plugins --check imports each one" in shown
    assert main(["plugins", "--json", "--block", "broken"]) == 0
    states = {record["name"]: record["state"] for record in json.loads(capsys.readouterr().out)}
    assert states["broken"] == "blocked"
    assert states["algos"] == "installed"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plugins"], ["plan", "--help"], ["fit", "--help"]])
def test_what_needs_no_torch_starts_at_once(arguments):
    """Catches an import at the top of a module that makes each of these take seconds; measured: below 0.4 s."""
    script = (
        "import sys; from rlplug.cli.main import main; status = main(sys.argv[1:]); "
        "heavy = {'torch', 'transformers', 'lightning', 'jsonargparse', 'numpy'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 5


def test_help_is_a_screen_and_all_of_it_shows_the_keys_of_rlplug_first(capsys):
    """Catches 40 options of Lightning's Trainer before the first of the run's own, and a help that scrolls away."""
    assert main(["fit", "--help"]) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 40
    assert all(re.search(rf"^  .*\b{key}\b", screen, re.M) for key in SHORT_KEYS)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help=all"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: rlplug fit [-c CONFIG] [--KEY VALUE] ...")
    assert shown.index("--model.batch.group_size") < shown.index("--trainer.precision")
    assert "\x08" not in shown


def test_a_shell_completes_commands_and_keys(capsys):
    """Catches a script without keys, and one that starts a process at each Tab."""
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    asked = script + "\nCOMP_WORDS=(rlplug fit --model.batch.gr); COMP_CWORD=2; _shtab_rlplug; echo ${COMPREPLY[@]}"
    found = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False).stdout
    assert found.split() == ["--model.batch.group_size"]
    assert "python" not in script


def test_misspelled_block_is_a_usage_error(capsys):
    assert main(["plugins", "--block", "algo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlplug: cannot block 'algo': no plugin has that name. Did you mean 'algos'?")


def test_an_error_of_a_callback_names_it() -> None:
    """Alone catches an error of a configured callback that is said to be rlplug's."""
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[LambdaCallback(on_fit_start=lambda: None)])
    with pytest.raises(TypeError) as caught:
        call._call_callback_hooks(trainer, "on_fit_start")
    assert explain_failure(caught.value)[0].startswith("the callback LambdaCallback raised TypeError: ")


def test_a_place_that_cannot_be_written_is_no_bug_of_ours() -> None:
    """Alone catches a traceback, and the words "an error of rlplug", where a logger finds a file for its folder."""
    text, has_traceback = explain_failure(NotADirectoryError(20, "Not a directory", "/dev/null/x"))

    assert "'/dev/null/x'" in text
    assert "Mend that place, or give another" in text
    assert not has_traceback
