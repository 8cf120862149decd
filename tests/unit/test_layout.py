"""The floors of ``rlplug/``: a room imports lower rooms only, and no module waits for itself."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

from distributions import plugin_distributions

PACKAGE = Path(__file__).parents[2] / "rlplug"
FLOORS = [
    {"errors", "token_arrays", "plugin_names", "late_names"},
    {"types", "timeouts"},
    {"ops", "interfaces", "distributed"},
    {"registry", "weight_sync", "observability"},
    {"rewards", "data"},
    {"models", "rollout"},
    {"training"},
    {"config"},
    {"hookspecs"},
    {"plugin_checks", "builtin_plugin"},
    {"plugin_manager"},
    {"setup"},
    {"recording"},
    {"module"},
    {"cli"},
    {"training_run"},
    {"__main__"},
]
"""Lowest first. A room is a folder or a file at the top of the package; rooms of a floor do not import each other."""


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imports(path: Path, name: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and module of each import of rlplug in a file: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [member if member in known else str(node.module) for member in members]
        else:
            continue
        yield from ((node.lineno, target) for target in found if target.partition(".")[0] == "rlplug")


def known_modules() -> set[str]:
    return {name.removesuffix(".__init__") for name in modules()}


def room(module: str) -> str:
    return [*module.split("."), ""][1]


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle, the first of them again at the end, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_a_room_imports_lower_rooms_only() -> None:
    floor_of = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    wrong = []
    for name, path in modules().items():
        for line, target in imports(path, name, known_modules()):
            here, there = room(name), room(target)
            if here == "__init__" or here == there or there == "":
                continue
            if floor_of[there] >= floor_of[here]:
                wrong.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports {target}")
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        graph[name.removesuffix(".__init__")] = {target for _, target in imports(path, name, known_modules())}
    assert cycle_of(graph) == []


def test_the_core_stays_small() -> None:
    """A feature is a plugin: where this fails, move one out."""
    files = modules().values()
    assert len(files) <= 210
    assert sum(len(path.read_text().splitlines()) for path in files) <= 25_000


def test_the_core_names_no_wheel() -> None:
    """Nothing but the generated index says what other distributions are called: they have no privilege."""
    wheels = {name for each in plugin_distributions() for name in (each.name, *each.packages)}
    named = re.compile(rf"\b({'|'.join(sorted(wheels))})\b")
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{number} {line.strip()}"
        for path in modules().values()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if named.search(line)
    ]
    assert wrong == []


def test_no_room_is_crowded() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    counts = {folder: len(list(folder.glob("*.py"))) for folder in folders - {PACKAGE}}
    assert {str(folder): count for folder, count in counts.items() if count > 15} == {}
    assert len(list(PACKAGE.glob("*.py"))) <= 15
    assert len([path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()]) <= 16
