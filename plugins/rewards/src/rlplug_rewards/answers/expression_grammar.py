r"""Grammar of algebraic expressions, by precedence: sums, products, signs, powers, marks behind, and atoms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final

import mpmath

from rlplug_rewards.answers.arithmetic import (
    Number,
    add,
    as_float,
    divide,
    double_factorial,
    factorial,
    modulo,
    multiply,
    power,
    real_part,
    subtract,
)
from rlplug_rewards.answers.tokens import BEGIN, WORDS, Unreadable, is_number, tokens

Compute = Callable[[Mapping[str, Number]], Number]
DEEPEST: Final = 60
OPENS: Final = {"(": ")", "[": "]", "{": "}"}
WHOLE_NUMBERS: Final = frozenset("klmn")
"""Symbols that are whole numbers where a negative number has one as its exponent."""


class Grammar(ABC):
    """Reader of one expression by descent; what a command takes is read by a subclass."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens(text)
        self.at = 0
        self.names: set[str] = set()
        self.whole: set[str] = set()
        """Those of the names that are whole numbers, since the expression makes no sense for others."""
        self.bound: list[str] = []
        """Indices of the sums around what is read."""
        self.indices: set[str] = set()
        self.count = 0
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
        total, is_one = self.product(depth), True
        while self.peek() in ("+", "-"):
            operation = add if self.take() == "+" else subtract
            total, is_one = node(operation, total, self.product(depth)), False
        if self.peek() == "\\bmod":
            if not is_one:  # 3 + (4 mod 5), or (3 + 4) mod 5
                raise Unreadable("a remainder of a sum needs parentheses")
            self.take()
            total = node(modulo, total, self.power(depth))
        return total

    def product(self, depth: int) -> Compute:
        begin, total = self.at, self.signed(depth)
        while token := self.peek():
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                total = node(multiply, total, self.signed(depth))
            elif token == "/":
                self.take()
                total = node(divide, total, self.signed(depth))
            elif self.begins_factor(token):
                if is_number(token) and is_number(self.tokens[self.at - 1]) and self.at - begin == 1:
                    raise Unreadable("two numbers follow each other")
                begin, total = self.at, node(multiply, total, self.power(depth))
            else:
                break
        return total

    def begins_factor(self, token: str) -> bool:
        if token in OPENS or is_number(token) or token[0].isalpha():
            return True
        return token[0] == "\\" and token[1:] in BEGIN

    def signed(self, depth: int) -> Compute:
        if self.peek() in ("-", "+"):
            if depth > DEEPEST:
                raise Unreadable("it is nested too deeply")
            sign = self.take()
            value = self.signed(depth + 1)
            return node(subtract, constant(Fraction(0)), value) if sign == "-" else value
        return self.power(depth)

    def power(self, depth: int) -> Compute:
        base = self.postfix(depth)
        if self.peek() in ("^", "**"):
            self.take()
            begin = self.at
            exponent = self.exponent(depth + 1)
            if self.peek() == "!":  # 2^{3}! is (2^3)! or 2^{3!}
                raise Unreadable("a factorial of a power needs parentheses")
            letters = WHOLE_NUMBERS.intersection(self.tokens[begin : self.at])
            if letters and _is_negative(base):
                self.whole |= letters
            return self.marked(node(power, base, exponent), begin)
        return base

    def exponent(self, depth: int) -> Compute:
        if self.peek() in ("-", "+"):
            sign = self.take()
            value = self.exponent(depth + 1)
            return node(subtract, constant(Fraction(0)), value) if sign == "-" else value
        if self.peek() == "{":
            value = self.group(self.take(), depth)
            if self.peek() not in ("^", "**"):
                return value
            self.take()
            return node(power, value, self.exponent(depth + 1))
        return self.power(depth)

    def postfix(self, depth: int) -> Compute:
        begin = self.at
        return self.marked(self.atom(depth), begin)

    def marked(self, value: Compute, begin: int) -> Compute:
        """Read the marks behind what was read from a token on, such as ``!`` and ``%``."""
        while self.peek() in ("!", "%", "\\deg", "'"):
            mark = self.take()
            if mark == "!" and self.peek() == "!":
                self.take()
                self.whole |= self.names.intersection(self.tokens[begin : self.at])
                value = node(double_factorial, value)
            elif mark == "!":
                value = node(factorial, value)
            elif mark == "%":
                value = node(divide, value, constant(Fraction(100)))
            elif mark == "\\deg":
                value = node(multiply, value, lambda _: mpmath.pi / 180)
            else:
                raise Unreadable("a prime is no operation")
        return value

    def atom(self, depth: int) -> Compute:
        token = self.take()
        if is_number(token):
            return self.numeral(token)
        if token in OPENS:
            return self.group(token, depth)
        if token == "|":
            inner = self.sum(depth + 1)
            self.take("|")
            return node(lambda value: abs(value), inner)
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
        return constant(Fraction(token))

    def symbol(self, name: str) -> Compute:
        if self.peek() == "_":
            self.take()
            name += f"_{self.subscript()}"
        if name in self.bound:
            return lambda point: point[name]
        if name in self.indices:
            raise Unreadable(f"{name} counts the terms of a sum that has ended")
        if name == "e":
            return lambda _: mpmath.e + 0
        if name == "i":
            return lambda _: mpmath.mpc(0, 1)
        self.names.add(name)
        return lambda point: point[name]

    def subscript(self) -> str:
        parts = []
        if self.peek() != "{":
            parts.append(self.take())
        else:
            self.take()
            while self.peek() != "}":
                parts.append(self.take())
            self.take("}")
        if any(part.lstrip("\\") in self.bound for part in parts):
            raise Unreadable("a term of a sequence is no number")
        return "".join(parts)

    @abstractmethod
    def command(self, name: str, depth: int) -> Compute:
        """Read what follows a command or a name of a function, and return its value."""


def constant(value: Number) -> Compute:
    return lambda _: value


def node(operation: Callable[..., Number], *parts: Compute) -> Compute:
    return lambda point: operation(*[part(point) for part in parts])


def _is_negative(value: Compute) -> bool:
    """Return whether an expression is a negative number; one with symbols is none."""
    try:
        number = value({})
        return bool(mpmath.im(as_float(number)) == 0 and real_part(number) < 0)
    except (KeyError, ArithmeticError, ValueError, TypeError):
        return False
