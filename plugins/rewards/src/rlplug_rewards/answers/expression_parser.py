r"""Reader of algebraic expressions with their commands: ``\frac{1}{2}``, functions, and sums over a range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

import mpmath

from rlplug_rewards.answers.arithmetic import (
    Number,
    applied,
    as_float,
    binomial,
    divide,
    greatest_divisor,
    largest,
    least,
    least_multiple,
    multiply,
    permutations,
    power,
    root,
    rounded,
)
from rlplug_rewards.answers.expression_grammar import DEEPEST, OPENS, Compute, Grammar, constant, node
from rlplug_rewards.answers.series import most_terms, series
from rlplug_rewards.answers.tokens import COMMANDS, FUNCTIONS, GREEK, Unreadable, is_number

MOST_SERIES: Final = 4
"""Most sums and products over a range in an expression."""
SEVERAL: Final[Mapping[str, Callable[..., Number]]] = {
    "gcd": greatest_divisor,
    "lcm": least_multiple,
    "max": largest,
    "min": least,
    "permutations": permutations,
}
"""Functions of numbers in parentheses with semicolons between them."""


class Parser(Grammar):
    """Reader of one expression."""

    def command(self, name: str, depth: int) -> Compute:
        if depth > DEEPEST:
            raise Unreadable("it is nested too deeply")
        if name == "pi":
            return lambda _: mpmath.pi + 0
        if name in ("infty", "infinity"):
            return lambda _: mpmath.inf
        if name in GREEK:
            return self.symbol(name)
        if name in ("frac", "binom"):
            above, below = self.argument(depth), self.argument(depth)
            return node(divide if name == "frac" else binomial, above, below)
        if name in ("sqrt", "cbrt"):
            degree = constant(Fraction(2 if name == "sqrt" else 3))
            if self.peek() == "[":
                self.take()
                degree = self.sum(depth + 1)
                self.take("]")
            return node(root, self.argument(depth), degree)
        if name in ("lfloor", "lceil"):
            inner = self.sum(depth + 1)
            self.take("\\r" + name[1:])
            return node(lambda value: rounded(math.floor if name == "lfloor" else math.ceil, value), inner)
        if name in ("abs", "floor", "ceil"):
            inner = self.argument(depth)
            whole = {"floor": math.floor, "ceil": math.ceil}.get(name)
            return node(abs if whole is None else lambda value: rounded(whole, value), inner)
        if name == "overline":
            return self.conjugate(depth)
        if name in SEVERAL:
            return self.several(name, depth)
        if name in ("sum", "prod"):
            return self.series(name, depth)
        if name in FUNCTIONS or name in COMMANDS:
            return self.function(name, depth)
        raise Unreadable(f"{name} is not known")

    def argument(self, depth: int) -> Compute:
        r"""Read what a command takes: a group, or one token (``\frac12`` has two digits)."""
        token = self.peek()
        if token and is_number(token) and len(token) > 1 and token.isdigit() and self.tokens[self.at - 1][0] == "\\":
            if self.tokens[self.at - 1] == "\\frac":
                self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        elif token in ("-", "+"):
            return self.signed(depth + 1)
        if token and token not in OPENS and token[0] != "\\" and not is_number(token) and not token[0].isalpha():
            raise Unreadable(f"{token!r} is no argument")
        return self.atom(depth + 1)

    def function(self, name: str, depth: int) -> Compute:
        function = FUNCTIONS.get(name) or COMMANDS[name]
        base: Compute | None = None
        if name == "log" and self.peek() == "_":
            self.take()
            base = self.argument(depth)
        raised: Compute | None = None
        if self.peek() in ("^", "**"):
            self.take()
            at = self.at
            raised = self.exponent(depth + 1)
            if "".join(self.tokens[at : self.at]).strip("{}") == "-1" and f"arc{name}" in FUNCTIONS:
                function, raised = FUNCTIONS[f"arc{name}"], None
        if name == "log" and self.peek() == "_":
            self.take()
            base = self.argument(depth)
        inner = self.argument_of_function(depth + 1)
        value = node(lambda number: applied(function, number), inner)
        if base is not None:
            value = node(divide, value, node(lambda number: applied(mpmath.log, number), base))
        return value if raised is None else node(power, value, raised)

    def conjugate(self, depth: int) -> Compute:
        r"""Read ``\overline{3 + 4i}``. Over letters, the line is one of a segment, digits or a complement."""
        begin, names = self.at, len(self.names)
        self.take("{")
        inner = self.group("{", depth)
        if "i" not in self.tokens[begin : self.at] or len(self.names) > names:
            raise Unreadable("a line over what is no complex number")
        return node(lambda value: mpmath.conj(as_float(value)), inner)

    def several(self, name: str, depth: int) -> Compute:
        r"""Read the arguments of a function of several numbers, ``(12; 18)``."""
        begin = self.at
        self.take("(")
        arguments = [self.sum(depth + 1)]
        while self.peek() == ";":
            self.take()
            arguments.append(self.sum(depth + 1))
        self.take(")")
        if name not in ("max", "min"):
            self.whole |= self.names.intersection(self.tokens[begin : self.at])
        return node(SEVERAL[name], *arguments)

    def series(self, name: str, depth: int) -> Compute:
        r"""Read what follows ``\sum`` or ``\prod``: the range, and the term up to the next sign."""
        begin = self.at
        index, low, high = self.range(depth)
        limits = self.names.intersection(self.tokens[begin : self.at])
        self.whole |= limits
        if index in self.names or index in self.bound:
            raise Unreadable(f"{index} has another meaning outside of the sum")
        self.count += 1
        self.bound.append(index)
        self.indices.add(index)
        if self.count > MOST_SERIES or len(self.bound) > 2:
            raise Unreadable("it has too many sums")
        begin, names = self.at, self.names
        self.names = set()
        term = self.product(depth + 1)
        self.bound.pop()
        read, has_names = self.tokens[begin : self.at], bool(self.names or limits)
        self.names |= names
        if name == "prod" and _has_sign(read):
            raise Unreadable("the term of a product needs parentheses")
        is_nested = bool(self.bound) or "\\sum" in read or "\\prod" in read
        most = most_terms(read, has_names, is_nested)

        def compute(point: Mapping[str, Number]) -> Number:
            return series(name == "sum", low(point), high(point), most, lambda number: term({**point, index: number}))

        return compute

    def range(self, depth: int) -> tuple[str, Compute, Compute]:
        r"""Read the index of a sum and its bounds, ``_{k=1}^{10}`` or ``_{1 \le k \le 10}``."""
        self.take("_")
        self.take("{")
        low = None if self.tokens[self.at + 1 : self.at + 2] == ["="] else self.sum(depth + 1)
        if low is not None:
            self.take("\\le")
        index = self.take().lstrip("\\")
        if not index.isalpha():
            raise Unreadable(f"{index!r} is no index")
        self.take("=" if low is None else "\\le")
        bound = self.sum(depth + 1)
        self.take("}")
        if low is None:
            self.take("^")
            low, bound = bound, self.exponent(depth + 1)
        return index, low, bound

    def argument_of_function(self, depth: int) -> Compute:
        r"""Read the argument of a function: a group, or a product up to the next function, as in ``\sin 2x \cos x``."""
        if self.peek() in ("(", "{", "["):
            return self.power(depth) if self.peek() == "{" else self.group(self.take(), depth)
        value = self.signed(depth)
        while (
            (token := self.peek())
            and self.begins_factor(token)
            and token.lstrip("\\") not in FUNCTIONS
            and token not in OPENS
        ):
            value = node(multiply, value, self.power(depth))
        return value


def _has_sign(term: list[str]) -> bool:
    """Return whether a sign of multiplication or division stands outside of the brackets of a term."""
    depth = 0
    for token in term:
        depth += (token in OPENS) - (token in OPENS.values())
        if depth == 0 and token in ("*", "/", "\\cdot", "\\times"):
            return True
    return False
