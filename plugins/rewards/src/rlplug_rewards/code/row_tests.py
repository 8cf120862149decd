"""Tests of a prompt's row, and which names in them are the code's: known before any code runs, so it cannot choose."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlplug.errors import brief, describe

BUILT_IN: Final = frozenset(dir(builtins))


@dataclass(frozen=True)
class RowTests:
    """Tests and cases of a row.

    Attributes:
        tests: Python statements.
        cases: Pairs of an input and the output that it must have.
        names: Names in the tests that are the code's.
        classes: Those of them whose instances the tests make and use as objects.
        modules: Modules of the standard library that the tests use without an import.
    """

    tests: list[str]
    cases: list[tuple[str, str]]
    names: list[str]
    classes: list[str]
    modules: list[str]


def read_row(row: Mapping[str, Any], tests_key: str, cases_key: str, entry_point_key: str) -> RowTests:
    """Return the tests of a row.

    Raises:
        ValueError: They are malformed, there are none, or nobody can tell which function they test.
    """
    tests, cases = _plain(row.get(tests_key)), _plain(row.get(cases_key))
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"{tests_key!r} is {brief(tests)}, not a list of texts")
    if not isinstance(cases, list) or not all(_is_case(case) for case in cases):
        raise ValueError(f"{cases_key!r} is {brief(cases)}, not a list of objects with input and output")
    if not tests and not cases:
        raise ValueError(f"it has neither {tests_key!r} nor {cases_key!r}")
    entry_point = row.get(entry_point_key)
    try:
        trees = [ast.parse(test, f"<{tests_key}>") for test in tests]
        for test in tests:
            compile(test, f"<{tests_key}>", "exec")
    except (ValueError, SyntaxError, RecursionError, MemoryError) as problem:
        raise ValueError(describe(problem)) from problem
    names, modules = _names(trees, entry_point if isinstance(entry_point, str) else "", entry_point_key)
    called = [_with_call(test, tree, names, entry_point) for test, tree in zip(tests, trees, strict=True)]
    return RowTests(
        called,
        [(case["input"], case["output"]) for case in cases],
        sorted(names),
        _classes(trees, names),
        sorted(modules),
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value or []


def _is_case(case: Any) -> bool:
    return isinstance(case, Mapping) and all(isinstance(case.get(name), str) for name in ("input", "output"))


def _with_call(test: str, tree: ast.Module, names: set[str], entry_point: Any) -> str:
    """Return a test that calls the ``check(candidate)`` that it defines, as those of HumanEval leave it to the reader.

    Raises:
        ValueError: Nobody says what it checks.
    """
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and len(node.args.args) == 1}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "check" not in defined or "check" in used:
        return test
    if not isinstance(entry_point, str):
        raise ValueError("a test defines check(candidate) and does not call it: name the function in 'entry_point'")
    names.add(entry_point)
    return f"{test}\ncheck({entry_point})\n"


def _names(trees: Sequence[ast.Module], entry_point: str, key: str) -> tuple[set[str], set[str]]:
    """Return the names that are the code's, and the modules that tests use without an import.

    A name that a test neither binds nor finds in Python is the code's. Where there is none, the code's is the one
    built-in that the tests call.

    Raises:
        ValueError: They call several, and the row names no entry point.
    """
    free, called, modules = set(), set(), set()
    for tree in trees:
        bound = set(_bound(tree))
        bases = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        } - bound
        own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - bound
        modules |= {name for name in own & bases - calls if name in sys.stdlib_module_names}
        free |= own
        called |= calls
    modules -= called | {entry_point}
    names = free - BUILT_IN - modules
    if entry_point:
        names.add(entry_point)
    elif not names and len(called & BUILT_IN) > 1:
        raise ValueError(
            f"its tests call {', '.join(sorted(called & BUILT_IN))}, and all of these are built-ins: say in "
            "{key!r} which one "
            "the code defines"
        )
    elif not names:
        names = called & BUILT_IN
    return names, modules


def _classes(trees: Sequence[ast.Module], names: set[str]) -> list[str]:
    """Return the names with a capital letter whose results the tests use as objects of a class.

    They read an attribute of one, look into it, or compare it with another. A function that returns data is not among
    them, whatever the code makes of its name: so its result is never compared by the code.
    """
    found = set()
    for tree in trees:
        made = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

        def class_of(node: ast.AST, made: Mapping[str, ast.Call] = made) -> set[str]:
            """Return the class of which an expression is an instance."""
            if isinstance(node, ast.Name):
                node = made.get(node.id, node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id[:1].isupper():
                return {node.func.id}
            return set()

        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found |= class_of(node.value)
            elif isinstance(node, ast.withitem):
                found |= class_of(node.context_expr)
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                inside = [{each for part in _without_attributes(side) for each in class_of(part)} for side in sides]
                found |= set().union(*inside) if all(inside) else set()
                if isinstance(node.ops[0], ast.In | ast.NotIn):
                    found |= class_of(node.comparators[0])
    return sorted(found & names)


def _without_attributes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression, but for what it reads attributes of: those are data, or results of methods."""
    if not isinstance(node, ast.Attribute):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _without_attributes(child)


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif (isinstance(node, ast.ExceptHandler) and node.name) or (
            isinstance(node, ast.MatchAs | ast.MatchStar) and node.name
        ):
            yield node.name
