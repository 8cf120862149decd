"""The calculator that a policy may call: a plain function with type hints and a docstring."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as "(17 + 4) * 3".
    """
    value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def evaluate(node: ast.expr) -> int | float:
    """Return the value of a parsed expression; anything but arithmetic raises."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](evaluate(node.operand))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")
