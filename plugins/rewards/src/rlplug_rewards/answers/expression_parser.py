r"""Reader of algebraic expressions, by precedence: sums, products, signs, powers, and atoms such as ``\frac{1}{2}``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

import mpmath

from rlplug_rewards.answers.arithmetic import (
    Number,
    add,
    applied,
    binomial,
    divide,
    factorial,
    multiply,
    power,
    root,
    rounded,
    subtract,
)
from rlplug_rewards.answers.notation import GREEK_NAMES

MOST_TOKENS: Final = 2000
DEEPEST: Final = 60
Compute = Callable[[Mapping[str, Number]], Number]

FUNCTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **{
        name: getattr(mpmath, name)
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")
    },
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"a{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan")},
    "cis": mpmath.expj,
    "ln": mpmath.log,
    "log": mpmath.log,
    "lg": mpmath.log10,
}
GREEK: Final = frozenset((*GREEK_NAMES, *["Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega"]))
WORDS: Final = sorted(
    [*FUNCTIONS, "sqrt", "cbrt", "pi", "infinity", "infty", "abs", "floor", "ceil", "binom", "theta", "alpha", "beta"],
    key=len,
    reverse=True,
)
TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|\\(?P<command>[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<symbol>\*\*|.))", re.DOTALL
)
OPENS: Final = {"(": ")", "[": "]", "{": "}"}


class Unreadable(ValueError):
    """The text is no expression."""


class Parser:
    """Reader of one expression, by descent: sums, products, signs, powers, atoms."""

    def __init__(self, text: str) -> None:
        self.tokens = _tokens(text)
        self.at = 0
        self.names: set[str] = set()
        if not self.tokens:
            raise Unreadable("it is empty")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, expected: str = "") -> str:
        token = self.peek()
        if not token or (expected and token != expected):
            raise Unreadable(f"{token!r} stands where {expected or 'more'!r} is needed")
        self.at += 1
        return token

    def sum(self, depth: int) -> Compute:
        if depth > DEEPEST:
            raise Unreadable("it is nested too deeply")
        total = self.product(depth)
        while self.peek() in ("+", "-"):
            operation = add if self.take() == "+" else subtract
            total = _node(operation, total, self.product(depth))
        return total

    def product(self, depth: int) -> Compute:
        total = self.signed(depth)
        while token := self.peek():
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                total = _node(multiply, total, self.signed(depth))
            elif token == "/":
                self.take()
                total = _node(divide, total, self.signed(depth))
            elif self.begins_factor(token):
                if self.is_number(token) and self.is_number(self.tokens[self.at - 1]):
                    raise Unreadable("two numbers follow each other")
                total = _node(multiply, total, self.power(depth))
            else:
                break
        return total

    def is_number(self, token: str) -> bool:
        return token[0].isdigit() or (token[0] == "." and len(token) > 1)

    def begins_factor(self, token: str) -> bool:
        if token in ("(", "{", "[") or self.is_number(token) or token[0].isalpha():
            return True
        name = token[1:]
        return token[0] == "\\" and (
            name in GREEK
            or name in FUNCTIONS
            or name in ("frac", "sqrt", "pi", "binom", "infty", "lfloor", "lceil", "cbrt", "abs")
        )

    def signed(self, depth: int) -> Compute:
        if self.peek() in ("-", "+"):
            if depth > DEEPEST:
                raise Unreadable("it is nested too deeply")
            sign = self.take()
            value = self.signed(depth + 1)
            return _node(subtract, _constant(Fraction(0)), value) if sign == "-" else value
        return self.power(depth)

    def power(self, depth: int) -> Compute:
        base = self.postfix(depth)
        if self.peek() in ("^", "**"):
            self.take()
            return _node(power, base, self.exponent(depth + 1))
        return base

    def exponent(self, depth: int) -> Compute:
        if self.peek() in ("-", "+"):
            sign = self.take()
            value = self.exponent(depth + 1)
            return _node(subtract, _constant(Fraction(0)), value) if sign == "-" else value
        return self.power(depth)

    def postfix(self, depth: int) -> Compute:
        value = self.atom(depth)
        while self.peek() in ("!", "%", "\\deg", "'"):
            mark = self.take()
            if mark == "!":
                value = _node(factorial, value)
            elif mark == "%":
                value = _node(divide, value, _constant(Fraction(100)))
            elif mark == "\\deg":
                value = _node(multiply, value, lambda _: mpmath.pi / 180)
            else:
                raise Unreadable("a prime is no operation")
        return value

    def atom(self, depth: int) -> Compute:
        token = self.take()
        if self.is_number(token):
            return self.numeral(token)
        if token in OPENS:
            return self.group(token, depth)
        if token == "|":
            inner = self.sum(depth + 1)
            self.take("|")
            return _node(lambda value: abs(value), inner)
        if token[0] == "\\":
            return self.command(token[1:], depth)
        if token[0].isalpha():
            return self.command(token, depth) if token in WORDS else self.symbol(token)
        raise Unreadable(f"{token!r} begins no expression")

    def group(self, token: str, depth: int) -> Compute:
        inner = self.sum(depth + 1)
        self.take(OPENS[token])
        return inner

    def numeral(self, token: str) -> Compute:
        if len(token) > 3000:
            raise Unreadable("it has too many digits")
        if self.peek() == "_":
            raise Unreadable("a numeral of another base is no decimal")
        return _constant(Fraction(token))

    def symbol(self, name: str) -> Compute:
        if self.peek() == "_":
            self.take()
            name += f"_{self.subscript()}"
        if name == "e":
            return lambda _: mpmath.e + 0
        if name == "i":
            return lambda _: mpmath.mpc(0, 1)
        self.names.add(name)
        return lambda point: point[name]

    def subscript(self) -> str:
        if self.peek() != "{":
            return self.take()
        self.take()
        parts = []
        while self.peek() != "}":
            parts.append(self.take())
        self.take("}")
        return "".join(parts)

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
            return _node(divide if name == "frac" else binomial, above, below)
        if name in ("sqrt", "cbrt"):
            degree = _constant(Fraction(2 if name == "sqrt" else 3))
            if self.peek() == "[":
                self.take()
                degree = self.sum(depth + 1)
                self.take("]")
            return _node(root, self.argument(depth), degree)
        if name in ("lfloor", "lceil"):
            inner = self.sum(depth + 1)
            self.take("\\r" + name[1:])
            return _node(lambda value: rounded(math.floor if name == "lfloor" else math.ceil, value), inner)
        if name in ("abs", "floor", "ceil"):
            inner = self.argument(depth)
            whole = {"floor": math.floor, "ceil": math.ceil}.get(name)
            return _node(abs if whole is None else lambda value: rounded(whole, value), inner)
        if name in FUNCTIONS:
            return self.function(name, depth)
        raise Unreadable(f"{name} is not known")

    def argument(self, depth: int) -> Compute:
        r"""Read what a command takes: a group, or one token (``\frac12`` has two digits)."""
        token = self.peek()
        if (
            token
            and self.is_number(token)
            and len(token) > 1
            and token.isdigit()
            and self.tokens[self.at - 1][0] == "\\"
        ):
            if self.tokens[self.at - 1] == "\\frac":
                self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        elif token in ("-", "+"):
            return self.signed(depth + 1)
        if token and token not in OPENS and token[0] != "\\" and not self.is_number(token) and not token[0].isalpha():
            raise Unreadable(f"{token!r} is no argument")
        return self.atom(depth + 1)

    def function(self, name: str, depth: int) -> Compute:
        function = FUNCTIONS[name]
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
        value = _node(lambda number: applied(function, number), inner)
        if base is not None:
            value = _node(divide, value, _node(lambda number: applied(mpmath.log, number), base))
        return value if raised is None else _node(power, value, raised)

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
            value = _node(multiply, value, self.power(depth))
        return value


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for match in TOKEN.finditer(text.strip()):
        if match["command"]:
            tokens.append("\\" + match["command"])
        elif match["word"]:
            tokens += _words(match["word"])
        else:
            tokens.append(match["number"] or match["symbol"])
        if len(tokens) > MOST_TOKENS:
            raise Unreadable("it is too long")
    return tokens


def _words(word: str) -> list[str]:
    """Split letters into names of functions and symbols of one letter."""
    parts: list[str] = []
    while word:
        known = next(
            (name for name in WORDS if word.lower().startswith(name) and word.startswith((name, name.capitalize()))),
            None,
        )
        parts.append(known or word[0])
        word = word[len(parts[-1]) :]
    return parts


def _constant(value: Number) -> Compute:
    return lambda _: value


def _node(operation: Callable[..., Number], *parts: Compute) -> Compute:
    return lambda point: operation(*[part(point) for part in parts])
