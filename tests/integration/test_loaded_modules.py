"""What a run imports of rlplug: the core's own parts that it uses, and of installed plugins what it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributions import plugin_distributions

ROOT = Path(__file__).parents[2]
LOAD = """
import json, sys
from rlplug.cli.main import main
status = main(sys.argv[1:])
found = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
print(json.dumps({"status": status, "modules": found}))
"""
UNTIL_TORCH = """
import gc, os, sys
from rlplug.cli.main import main

class Torch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("collects:", gc.isenabled(), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
main(sys.argv[1:])
"""
"""Ends where torch would be imported."""
ALWAYS = {
    *("plugin", "memory_errors", "report_writer", "card_writer", "shared_prefixes", "compiler", "block_forward"),
    *("chat_templates", "tokenizer_files", "compile_cache"),
}
"""Modules of plugins that each run imports: what registers, observers, the layout of rows, and what bounds a tokenizer
and keeps compiled code."""


def modules_after(*arguments: str, status: int = 0) -> dict[str, Any]:
    """Return the modules of a new process after a command: a fork of the tests' server has them all."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["status"] == status, done.stdout
    found: dict[str, Any] = result["modules"]
    return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Modules after one step of the quickstart, without a report and a policy, which observers would write about."""
    folder = tmp_path_factory.mktemp("loaded")
    quiet = ("--run.report", "false", "--run.export_policy", "false", "--run.dir", str(folder))
    return modules_after("fit", "-c", "configs/quickstart.yaml", "--model.num_steps", "1", *quiet)


def test_a_step_loads_a_part_of_the_core(loaded: dict[str, Any]) -> None:
    files = [Path(file) for name, file in loaded.items() if name.split(".")[0] == "rlplug" and file]
    assert len(files) > 100
    assert sum(len(file.read_text().splitlines()) for file in files) <= 20_000


def test_a_run_loads_of_plugins_what_it_names(loaded: dict[str, Any]) -> None:
    """The quickstart names an algorithm; what others register is imported by nobody."""
    packages = {package for distribution in plugin_distributions() for package in distribution.packages}
    of_plugins = {name for name in loaded if name.split(".")[0] in packages}
    used = {name for name in of_plugins if name.split(".")[0] in ("rlplug_algos", "rlplug_watch")}
    others = {name for name in of_plugins - used if "." in name and name.split(".")[1] not in ALWAYS}
    assert others == set()
    assert "rlplug_algos.grpo" in used
    assert "rlplug_algos.dapo" not in used
    assert not {"rlplug_watch.page", "rlplug_watch.report.page", "plotly"} & loaded.keys()


def test_help_imports_no_library_that_takes_long() -> None:
    heavy = {"torch", "numpy", "lightning", "transformers", "rich", "pluggy", "rlplug.plugin_manager"}
    assert not heavy & modules_after("--help").keys()


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        ("fit", "model.batch.group_siz", "3"),
        ("plan", "model.batch.group_siz", "3"),
        ("eval", "model.batch.group_siz", "3"),
        ("fit", "algorithm", "GRP0"),
    ],
)
def test_what_does_not_exist_is_refused_before_torch_is_imported(command: str, key: str, value: str) -> None:
    """Catches a command, or a plugin, that imports torch before names are checked: eight seconds for a typo."""
    loaded = modules_after(command, "-c", "configs/quickstart.yaml", f"--{key}", value, status=2)
    assert not {"torch", "lightning"} & loaded.keys()


@pytest.mark.parametrize("arguments", [("fit",), ("plan", "--gpu-gib", "80"), ("eval",)], ids=lambda words: words[0])
def test_libraries_are_imported_without_garbage_collections(arguments: tuple[str, ...]) -> None:
    """Catches a command that imports torch outside of ``uncollected_imports``: a third of a plan's CPU time."""
    command = [sys.executable, "-c", UNTIL_TORCH, *arguments, "-c", "configs/quickstart.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "collects: False\n", done.stderr
