"""Readers of calls that are Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Final

from rlplug.errors import encodable
from rlplug_sandbox.call_records import MAX_CALLS, AnyCall, MalformedCall, Parameters, checked, malformed
from rlplug_sandbox.json_calls import calls_at

PYTHONIC_START: Final = "<|python_start|>"
PYTHONIC_HEAD: Final = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")

LONGEST_SOURCE: Final = 200_000
"""Most characters of pythonic calls: Python's parser can end the process on what is very long and deep."""
MAX_BRACKETS: Final = 200
"""Most brackets that may be open, and signs in a row, in pythonic calls, for the same reason."""
DEEP: Final = re.compile(rf"(?:[-+~]\s*|not\s+|lambda\s*:\s*|await\s+){{{MAX_BRACKETS}}}")
"""Operators in a row, which Python's parser nests without brackets."""
JSON_NAMES: Final = {"true": True, "false": False, "null": None}


def python_list(opening: str, closing: str) -> Callable[[str, Parameters], list[AnyCall]]:
    """Return a reader of ``[f(x=1), g()]`` between two marks, which a turn that is such a list may leave out."""

    def read(text: str, parameters: Parameters) -> list[AnyCall]:
        if opening not in text:
            return _listed(text.partition(closing)[0]) if PYTHONIC_HEAD.match(text) else []
        return [call for part in text.split(opening)[1 : MAX_CALLS + 2] for call in _listed(part.partition(closing)[0])]

    return read


def read_olmo(text: str, parameters: Parameters) -> list[AnyCall]:
    """Read ``<function_calls>`` with a call on each line."""
    source = text.partition("<function_calls>")[2].partition("</function_calls>")[0]
    tree = _parsed(source, "exec")
    if isinstance(tree, MalformedCall):
        return [tree]
    assert isinstance(tree, ast.Module)
    return [_python_call(each.value if isinstance(each, ast.Expr) else ast.Name("?")) for each in tree.body]


def _listed(source: str) -> list[AnyCall]:
    if source.lstrip().startswith(("[{", "{")):  # LFM2 can be asked to write JSON
        return list(calls_at(source, 0, "arguments"))
    tree = _parsed(source, "eval")
    if isinstance(tree, MalformedCall):
        return [tree]
    assert isinstance(tree, ast.Expression)
    if not isinstance(tree.body, ast.List):
        return [MalformedCall("calls must be a list, such as [name(argument=1)]")]
    return [_python_call(node) for node in tree.body.elts]


def _parsed(source: str, mode: str) -> ast.AST | MalformedCall:
    source = source.strip()
    if len(source) > LONGEST_SOURCE or DEEP.search(source) or _depth(source) > MAX_BRACKETS:
        return MalformedCall("the calls are not valid Python of a sensible size")
    try:
        return ast.parse(source, mode=mode)
    except SyntaxError as error:
        if mode == "eval" and "\n" in source:  # LFM2's template leaves the line ends of a text in its quotes
            return _parsed(source.replace("\n", "\\n"), mode)
        return _not_python(error)
    except (ValueError, MemoryError, RecursionError) as error:
        return _not_python(error)


def _not_python(error: Exception) -> MalformedCall:
    return MalformedCall(f"the calls are not valid Python: {encodable(getattr(error, 'msg', 'too deep'))[:500]}")


def _depth(source: str) -> int:
    """Return how many brackets are open at most, those in strings included."""
    depth = deepest = 0
    for character in source:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _name(node: ast.expr) -> str:
    """Return a function's name, with the dots of its namespace, or an empty text."""
    if isinstance(node, ast.Attribute):
        owner = _name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _python_call(node: ast.expr) -> AnyCall:
    if not isinstance(node, ast.Call) or not (name := _name(node.func)):
        return MalformedCall("a call must be of the form name(argument=1)")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return malformed("arguments must be named, as in name(argument=1)", name)
    names = [str(keyword.arg) for keyword in node.keywords]
    if len(set(names)) < len(names):
        return malformed("an argument is given twice", name)
    try:
        arguments = {
            name: ast.literal_eval(_JsonNames().visit(keyword.value))
            for name, keyword in zip(names, node.keywords, strict=True)
        }
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        message = "arguments must be plain values: numbers, strings, True, False, None, lists, dicts"
        return malformed(message, name)
    return checked(name, arguments)


class _JsonNames(ast.NodeTransformer):
    """Makes constants of the names of JSON's, which templates write within Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node
