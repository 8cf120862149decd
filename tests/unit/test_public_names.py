"""What plugins may import of the core. CONTRIBUTING.md says which kind of plugin each module is for."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from rlplug_devkit.new_plugin.kinds import KINDS
from rlplug_devkit.new_plugin.rendering import names_of, rendered_files

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "rlplug",  # a run from Python
    *("rlplug.errors", "rlplug.types", "rlplug.ops", "rlplug.interfaces", "rlplug.registry", "rlplug.plugin_manager"),
    *("rlplug_devkit", "rlplug.token_arrays", "rlplug.late_names"),
    # commands
    *("rlplug.cli.command_parser", "rlplug.cli.lightning_cli"),
    # rollout engines
    *("rlplug_engines.colocated", "rlplug_engines.servers", "rlplug_engines.servers.process_group"),
    *("rlplug_engines.engine_host", "rlplug.rollout.hf_engine", "rlplug_engines.workers"),
    *("rlplug.distributed.rng", "rlplug.weight_sync.manifest", "rlplug.weight_sync.receive_checks"),
    *("rlplug_engines.flat_buckets", "rlplug_engines.fp8_engine_checks"),
    # sources of groups
    "rlplug.rollout.source",
    # optimizations
    *("rlplug.models.lm_head", "rlplug.distributed.strategy", "rlplug.distributed.mesh"),
    *(
        "rlplug.distributed.offload",
        "rlplug.distributed.fsdp_units",
        "rlplug.config",
        "rlplug.models.packing",
        "rlplug.training.row_layout",
    ),
    # trainers
    *("rlplug.models.attention", "rlplug.models.attention.kernels", "rlplug.models.attention.products"),
    "rlplug.models.attention.sequences",
    *("rlplug.models.hf_files", "rlplug.models.loading", "rlplug.models.transformers_trainer"),
    "rlplug.weight_sync.hf_names",
    # environments
    *("rlplug.data.sources", "rlplug_sandbox.tool_calls", "rlplug.rewards", "rlplug.distributed.child_process"),
    # launchers
    *("rlplug_launch.launcher", "rlplug_launch.processes"),
}
FORMER_PARTS = {"async", "data", "devkit", "engines", "eval", "launch", "plan", "rewards", "sandbox", "watch"}
"""Plugins that were rooms of the core. They are released with it at one version, and import other modules of it too,
which may change with each release; anybody may, and nobody is promised anything."""
FACES = (
    *("rlplug.interfaces", "rlplug_engines.colocated", "rlplug_engines.servers", "rlplug_engines.workers"),
    "rlplug_devkit",
)
"""Packages of which plugins import the names in ``__all__`` alone."""


SHARED = ("rlplug_devkit", "rlplug_engines", "rlplug_launch", "rlplug_sandbox")
"""Packages of other distributions with something for plugins."""


def imports() -> Iterator[tuple[str, str, list[str]]]:
    """Yield place, module and names of each import of the core, or of what is shared, in a plugin, in functions too."""
    for path in sorted(ROOT.glob("plugins/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                found = [(str(node.module), [alias.name for alias in node.names])]
            elif isinstance(node, ast.Import):
                found = [(alias.name, []) for alias in node.names]
            else:
                continue
            for module, names in found:
                package = module.partition(".")[0]
                if package in ("rlplug", *SHARED) and package not in path.relative_to(ROOT).parts:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", module, names


def test_plugins_import_public_modules_alone() -> None:
    found = list(imports())
    assert len(found) > 100
    wrong = [
        f"{place} imports {module}"
        for place, module, _ in found
        if module not in PUBLIC and place.split("/")[1] not in FORMER_PARTS
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("face", FACES)
def test_plugins_import_names_that_a_package_lists(face: str) -> None:
    listed = importlib.import_module(face).__all__
    of_plugins = [each for each in imports() if each[0].split("/")[1] not in FORMER_PARTS]
    wrong = [f"{place}: {set(names) - {*listed}}" for place, module, names in of_plugins if module == face]
    assert [line for line in wrong if not line.endswith("set()")] == []


def test_no_module_is_public_for_nobody() -> None:
    """A plugin of this repository imports it, or a page for authors tells them to."""
    guide = (ROOT / "docs/writing-an-engine.md").read_text()
    unused = (
        {each for each in PUBLIC if each.startswith("rlplug.")}
        - {module for _, module, _ in imports()}
        - {module for _, module in taught()}
    )
    assert {module for module in unused if f"](../{module.replace('.', '/')}" not in guide} == set()


def contributed() -> set[str]:
    """Return the words in code of CONTRIBUTING's list of public modules."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    start = guide.index("- The core imports no plugin")
    return set(re.findall(r"`([\w.]+)`", guide[start : guide.index("\n\n", start)]))


def test_contributors_can_read_which_modules_are_public() -> None:
    words = contributed()
    missing = [name for name in sorted(PUBLIC) if name not in words and name.rpartition(".")[2] not in words]
    assert missing == []


def test_contributing_lists_no_module_that_is_not_public() -> None:
    listed = {word for word in contributed() if word.startswith("rlplug.")}
    packages = {name.rpartition(".")[0] for name in PUBLIC}  # "of `rlplug.models` the modules ..."
    assert listed - PUBLIC - packages == set()


def taught() -> list[tuple[str, str]]:
    """Return place and module of each import of the core in code of the pages and in files of ``rlplug new-plugin``."""
    texts = {f"new-plugin's {kind}": "\n".join(rendered_files(names_of("my-part"), kind).values()) for kind in KINDS}
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        texts[page.name] = "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S))
    pattern = re.compile(r"^\s*(?:from|import) (rlplug(?:\.\w+)*)(?: import|$)", re.M)
    return [(where, module) for where, text in texts.items() for module in pattern.findall(text)]


def test_pages_tell_authors_to_import_public_modules_alone() -> None:
    assert len(taught()) > 50
    assert {f"{where} imports {module}" for where, module in taught() if module not in PUBLIC} == set()


@pytest.mark.parametrize("package", ["types", "interfaces"])
def test_pydoc_shows_what_is_said_of_fields(package: str) -> None:
    """It reads the class's docstring, and no text below a field."""
    lost = []
    for path in (ROOT / "rlplug" / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            body = node.body if isinstance(node, ast.ClassDef) else []
            for field, below in pairwise(body):
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and is_text:
                    lost.append(f"{path.name}:{below.lineno}")
    assert not lost, f"move these texts into the section Attributes of their classes: {', '.join(lost)}"
