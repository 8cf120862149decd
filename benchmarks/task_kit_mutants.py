"""Mutants of this repository's own rewards, environments and sources, and how many of them the kits catch.

    python -m benchmarks.task_kit_mutants --kind source --most 60 --out survivors.json

Each mutant is a class or function with one small change, by a fixed list of operators. The kit runs on it in this
process, check by check, until the first that fails. Nothing else tests it: what a kit misses here, an author's own
tests have to find.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.mutant_checks import first_failure
from benchmarks.task_kit_checks import Subject
from benchmarks.task_kit_subjects import SUBJECTS

SWAPPED: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
ANNOTATIONS: Final = annotations.compiler_flag
"""So that no annotation is evaluated, as in the modules themselves."""
CASTS: Final = frozenset({"int", "float", "str", "bool", "list", "tuple", "dict", "set", "sorted"})
UNCHANGED: Final = frozenset({"annotation", "returns", "decorator_list", "type_params"})
Mutation = tuple[str, Callable[[], None]]
"""What is changed, and a function that changes it in the tree."""


def mutations(tree: ast.AST) -> Iterator[Mutation]:
    """Yield the changes that can be made to a tree, each of which is made on its own."""
    for name, value in ast.iter_fields(tree):
        if name in UNCHANGED:
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list):
            yield from _in_list(tree, name, value)
        elif isinstance(value, ast.expr):
            yield from _of_expression(value, lambda new, name=name: setattr(tree, name, new))
        for inner in values:
            if isinstance(inner, ast.AST) and not isinstance(inner, ast.Raise):  # a message is no promise
                yield from mutations(inner)
    yield from _of_operators(tree)


def _in_list(node: ast.AST, name: str, values: list[Any]) -> Iterator[Mutation]:
    for place, value in enumerate(values):
        if isinstance(value, ast.expr):
            yield from _of_expression(value, lambda new, place=place: values.__setitem__(place, new))
        if name in ("body", "orelse", "finalbody") and _can_be_dropped(value):
            dropped = ast.copy_location(ast.Pass(), value)
            yield f"line {value.lineno}: drop {ast.unparse(value)}", lambda p=place, d=dropped: values.__setitem__(p, d)
    if isinstance(node, ast.Call) and name == "args" and len(values) == 2:
        yield f"line {node.lineno}: swap arguments of {ast.unparse(node)}", values.reverse


def _can_be_dropped(statement: Any) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    is_simple = isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Continue | ast.Break | ast.Raise)
    return is_simple and not is_text


def _of_expression(value: ast.expr, put: Callable[[ast.expr], None]) -> Iterator[Mutation]:
    where = f"line {value.lineno}: {ast.unparse(value)}"
    others: list[ast.expr] = []
    if isinstance(value, ast.Constant):
        others += [ast.Constant(other) for other in _other_constants(value.value)]
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in CASTS and value.args:
        others.append(value.args[0])
    elif isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not | ast.USub):
        others.append(value.operand)
    elif isinstance(value, ast.IfExp):
        others += [value.body, value.orelse]
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
        others.append(value.func.value)  # text.strip() becomes text
    for other in others:
        yield f"{where} becomes {ast.unparse(other)}", lambda other=other: put(ast.copy_location(other, value))


def _other_constants(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1]
    return ["" if value else "mutant"] if isinstance(value, str) and len(value) < 30 else []


def _of_operators(node: ast.AST) -> Iterator[Mutation]:
    for name in ("op", "ops"):
        found = getattr(node, name, None)
        for place, operator in enumerate(found if isinstance(found, list) else [found]):
            if type(operator) in SWAPPED:
                new: Any = SWAPPED[type(operator)]()
                text = f"line {node.lineno}: {ast.unparse(node)} with {type(new).__name__}"  # type: ignore[attr-defined]
                if isinstance(found, list):
                    yield text, lambda found=found, place=place, new=new: found.__setitem__(place, new)
                else:
                    yield text, lambda node=node, new=new: setattr(node, "op", new)
    if isinstance(node, ast.If):
        test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        yield f"line {node.lineno}: if not {ast.unparse(node.test)}", lambda: setattr(node, "test", test)


@dataclass(frozen=True)
class Site:
    """A place of a subject that can be changed."""

    module: str
    name: str
    """Class or function."""
    number: int
    """Place among its mutations."""
    text: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}, {self.text}"


def sites(subject: Subject) -> list[Site]:
    """Return all places of a subject that can be changed."""
    return [
        Site(module, node.name, number, text)
        for module, names in subject.parts.items()
        for node in _nodes(module, names)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for number, (text, _) in enumerate(mutations(node))
    ]


def build(subject: Subject, site: Site | None) -> dict[str, Any]:
    """Return the subject's classes and functions by name, one of them with the change of a site."""
    made: dict[str, Any] = {}
    for module_name, names in subject.parts.items():
        module = importlib.import_module(module_name)
        namespace = dict(vars(module))
        namespace |= {name: value for name, value in made.items() if name in namespace}
        nodes = _nodes(module_name, names)
        for node in nodes if site is not None and site.module == module_name else ():
            if getattr(node, "name", None) == site.name:  # type: ignore[union-attr]
                list(mutations(node))[site.number][1]()  # type: ignore[union-attr]
        tree = ast.fix_missing_locations(ast.Module(nodes, []))
        flags = ANNOTATIONS
        exec(compile(tree, str(module.__file__), "exec", flags=flags, dont_inherit=True), namespace)
        made |= {name: namespace[name] for name in names}
    return made


def _nodes(module: str, names: tuple[str, ...]) -> list[ast.stmt]:
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())
    return [node for node in tree.body if getattr(node, "name", None) in names or _is_table(node, names)]


def _is_table(node: ast.stmt, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in names


Killer = Callable[[Any], str | None]
"""Returns the first check of a test class that fails, or ``None``."""


def _killer(subject: Subject, site: Site, killer: Killer) -> str | None:
    try:
        checks = subject.checks(build(subject, site))
    except Exception as error:  # noqa: BLE001 - the change broke the class itself
        return f"its import: {type(error).__name__}"
    return killer(checks)


def main(
    about: str | None,
    subjects_of: Mapping[str, Sequence[Subject]],
    killed_by: Killer,
    is_drawn: Callable[[Site], bool] = lambda site: True,
) -> None:
    """Draw mutants of one kind of subjects as the command line says, run the kit on each, and print what it killed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--kind", choices=sorted(subjects_of), required=True)
    parser.add_argument("--most", type=int, default=60, help="mutants that are drawn, of all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a site's text: no other is drawn")
    parser.add_argument("--again", type=Path, help="such a file: its survivors are run instead of others")
    parser.add_argument("--out", type=Path, help="file for the survivors and what killed the others")
    options = parser.parse_args()
    subjects: dict[Site, list[Subject]] = {}
    for subject in subjects_of[options.kind]:
        found = killed_by(subject.checks(build(subject, None)))
        assert found is None, f"{subject.name}: the kit refuses it without a change: {found}"
        for site in sites(subject):
            subjects.setdefault(site, []).append(subject)
    drawn = [site for site in subjects if options.only in str(site) and is_drawn(site)]
    num_sites = len(drawn)
    random.Random(options.seed).shuffle(drawn)
    if options.again:
        survivors = {each["mutant"] for each in json.loads(options.again.read_text()) if each["killed_by"] is None}
        drawn = [site for site in drawn if str(site) in survivors]
    results, began = [], time.monotonic()
    for site in drawn[: options.most]:
        killers = (_killer(subject, site, killed_by) for subject in subjects[site])
        killer = next(filter(None, killers), None)
        results.append({"mutant": str(site), "killed_by": killer})
        print(f"{'killed by ' + killer if killer else 'SURVIVED'}: {site}", file=sys.stderr, flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
    num_killed = sum(result["killed_by"] is not None for result in results)
    print(
        f"{options.kind}: {num_killed} of {len(results)} mutants killed, drawn from {num_sites}, in "
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main(__doc__, SUBJECTS, first_failure)
