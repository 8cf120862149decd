"""What the distribution registers, what goes together, and that configurations name what there is."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import rlplug_optims
import yaml
from rlplug_optims import Muon, plugin

from rlplug.interfaces import Optimization
from rlplug.plugin_names import plugin_index
from rlplug.registry import Registry

ROOT = Path(__file__).parents[3]
CLASSES = {name: getattr(rlplug_optims, name) for name in rlplug_optims.__all__ if name != Muon.__name__}
CONFLICTS = {
    ("ActivationOffload", "Liger"): False,
    ("CompileBlocks", "Liger"): True,
    ("EntropyCheckpointing", "EntropyChunking"): False,
    ("EntropyCheckpointing", "FusedLogprobs"): True,
    ("EntropyChunking", "FusedLogprobs"): True,
    ("GradientCheckpointing", "SelectiveCheckpointing"): True,
}


def test_every_optimization_is_registered_exported_and_known():
    registry = Registry()
    registry.set_owner("rlplug-optims")
    plugin.rlplug_register_optimizations(registry)
    defined = {cls for cls in all_subclasses(Optimization) if cls.__module__.startswith("rlplug_optims.")}
    assert set(registry.classes("optimizations").values()) == {c for c in defined if not c.__name__.startswith("_")}
    assert set(rlplug_optims.__all__) == {*CLASSES, Muon.__name__}
    assert set(plugin_index()["rlplug-optims"]["classes"]) == {*CLASSES, Muon.__name__, "CompileCache", "StateOffload"}


def all_subclasses(cls):
    return {cls, *itertools.chain.from_iterable(all_subclasses(sub) for sub in cls.__subclasses__())}


def test_both_sides_of_a_conflict_give_one_reason():
    """A reason on one side is enough to refuse; on both, the same must be said."""
    found = set()
    for name, optimization in CLASSES.items():
        for other, reason in optimization.conflicts.items():
            assert CLASSES[other].conflicts.get(name) == reason
            found.add(tuple(sorted((name, other))))
    assert found == {pair for pair, is_conflict in CONFLICTS.items() if is_conflict}


@pytest.mark.parametrize("file", sorted((ROOT / "configs/optim").glob("*.yaml")), ids=lambda file: file.stem)
def test_configurations_name_what_exists(file):
    model = yaml.safe_load(file.read_text())["model"]
    assert set(model) <= {"optimizations", "optimizer"}
    for entry in model.get("optimizations", []):
        CLASSES[entry["class_path"]](**entry.get("init_args", {}))


def test_the_table_of_the_documentation_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("table", ROOT / "scripts/write_optimization_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.table() in (ROOT / "docs/optimizations.md").read_text()
    assert all(f"| [`{name}`]" in script.table() for name in CLASSES)
