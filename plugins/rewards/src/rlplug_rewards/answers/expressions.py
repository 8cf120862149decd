r"""Algebraic expressions: read by precedence, and evaluated exactly or with 60 digits.

Two expressions are equal when they have the same value at random points. Nothing is simplified, so nothing runs for
ever, and a number that is too large is refused before it is computed.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Final

import mpmath

DIGITS: Final = 60
MOST_BITS: Final = 1 << 17
"""Largest exact number, in bits."""
MOST_TOKENS: Final = 2000
DEEPEST: Final = 60
Number = Any
"""A ``Fraction``, or a number of mpmath."""
Compute = Callable[[Mapping[str, Number]], Number]

FUNCTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **{
        name: getattr(mpmath, name)
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")
    },
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"a{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan")},
    "ln": mpmath.log,
    "log": mpmath.log,
    "lg": mpmath.log10,
}
GREEK: Final = frozenset(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
        "phi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Sigma",
        "Phi",
        "Psi",
        "Omega",
    ]
)
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


@dataclass(frozen=True)
class Expression:
    """An expression with its free symbols.

    Attributes:
        compute: Its value for values of its symbols.
        names: Its free symbols.
        places: Decimal places where it is a decimal alone, with significant digits, else ``None``.
    """

    compute: Compute
    names: frozenset[str]
    text: str
    places: tuple[int, int] | None = None

    @cached_property
    def value(self) -> Number | None:
        """The value of an expression without symbols; ``None`` where it has none."""
        return None if self.names else self.at({})

    def at(self, point: Mapping[str, Number]) -> Number | None:
        """Return the value at a point, or ``None`` where there is none."""
        with mpmath.workdps(DIGITS):
            try:
                value = self.compute(point)
                return value if isinstance(value, Fraction) or not mpmath.isnan(value) else None
            except (ArithmeticError, ValueError, TypeError, mpmath.libmp.ComplexResult, RecursionError):
                return None


def read_expression(text: str) -> Expression:
    """Return an expression.

    Raises:
        Unreadable: It is none.
    """
    parser = _Parser(text)
    compute = parser.sum(0)
    if parser.at < len(parser.tokens):
        raise Unreadable(f"{text!r} goes on after an expression")
    decimal = re.fullmatch(r"-?\s*(\d*)\.(\d+)", text.strip())
    places = None if decimal is None else (len(decimal[2]), len((decimal[1] + decimal[2]).lstrip("0")))
    return Expression(compute, frozenset(parser.names), text, places)


def equal(one: Expression, other: Expression) -> bool:
    """Return whether two expressions have the same value everywhere."""
    names = sorted(one.names | other.names)
    if not names:
        return equal_numbers(one, other)
    found = 0
    for point in points(names):
        left, right = one.at(point), other.at(point)
        if any(value < 0 for value in point.values()) and not (_is_real(left) and _is_real(right)):
            continue  # roots and logarithms of negative numbers have several values
        if left is None and right is None:
            continue
        if left is None or right is None:
            if all(value > 0 for value in point.values()):
                return False
            continue
        if not _close(left, right):
            return False
        found += 1
    return found >= 3


def equal_numbers(one: Expression, other: Expression) -> bool:
    """Return whether two numbers are equal; a rounded decimal of 6 digits is equal to what has no finite one."""
    left, right = one.value, other.value
    if left is None or right is None:
        return False
    if _close(left, right):
        return True
    for decimal, exact, rounded, value in ((one, other, left, right), (other, one, right, left)):
        if decimal.places is not None and decimal.places[1] >= 6 and exact.places is None and _is_endless(value):
            with mpmath.workdps(DIGITS):
                error = abs(_real(value) - _real(rounded)) * mpmath.mpf(10) ** decimal.places[0]
                if mpmath.im(_float(value)) == 0 and error <= mpmath.mpf("0.5000001"):
                    return True
    return False


def _is_real(value: Number | None) -> bool:
    return value is not None and (isinstance(value, Fraction) or mpmath.im(value) == 0)


def _is_endless(value: Number) -> bool:
    if not isinstance(value, Fraction):
        return True
    below = value.denominator
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below != 1


def _close(left: Number, right: Number) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    with mpmath.workdps(DIGITS):
        left, right = _float(left), _float(right)
        if mpmath.isinf(left) or mpmath.isinf(right):
            return bool(left == right)
        return bool(abs(left - right) <= mpmath.mpf(10) ** -45 * max(abs(left), abs(right), mpmath.mpf(10) ** -30))


def points(names: list[str]) -> list[dict[str, Fraction]]:
    """Return points with values of both signs and several sizes, the same ones for the same names."""
    points = []
    for number in range(10):
        point = {}
        for index, name in enumerate(names):
            seed = (number + 1) * 7919 + (index + 1) * 104729 + sum(map(ord, name)) * 31
            value = Fraction(seed % 9973 + 17, 1777 + (seed * 13) % 2003)
            point[name] = value if number < 6 or (number + index) % 2 else -value
        points.append(point)
    return points


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _float(value: Number) -> Any:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _real(value: Number) -> Any:
    return mpmath.re(_float(value))


def _both(operation: Callable[[Any, Any], Any]) -> Callable[[Number, Number], Number]:
    def compute(left: Number, right: Number) -> Number:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return operation(left, right)
        return operation(_float(left), _float(right))

    return compute


add, subtract, multiply, divide = (_both(each) for each in (operator.add, operator.sub, operator.mul, operator.truediv))


def power(base: Number, exponent: Number) -> Number:
    """Return a power, exactly where that is a fraction of a bearable size.

    Raises:
        OverflowError: It is larger than can be compared.
    """
    if isinstance(exponent, Fraction) and isinstance(base, Fraction):
        if exponent.denominator == 1:
            size = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator)
            if size <= MOST_BITS or abs(base) in (0, 1):
                return base ** int(exponent) if abs(base) > 1 or exponent > 0 or base else 1 / base
            raise OverflowError
        if base >= 0 and exponent.denominator < 64:
            above, below = (_root(each, exponent.denominator) for each in (base.numerator, base.denominator))
            if above is not None and below is not None:
                return power(Fraction(above, below), Fraction(exponent.numerator))
    base, exponent = _float(base), _float(exponent)
    if abs(exponent) > 10**6 or (base and abs(exponent * mpmath.log(base)) > 10**7):
        raise OverflowError
    return mpmath.power(base, exponent)


def _root(number: int, degree: int) -> int | None:
    if number < 2 or number.bit_length() > 4096:
        return number if number < 2 else None
    guess = round(number ** (1 / degree)) if number.bit_length() < 900 else math.isqrt(number) if degree == 2 else 0
    found: int | None = next(
        (each for each in (guess - 1, guess, guess + 1) if each >= 0 and each**degree == number), None
    )
    return found


def root(value: Number, degree: Number) -> Number:
    """Return the real root of a number where there is one, as readers of ``\\sqrt[3]{-8}`` expect."""
    if (
        isinstance(value, Fraction)
        and value < 0
        and isinstance(degree, Fraction)
        and degree.denominator == 1
        and degree % 2
    ):
        return -root(-value, degree)
    return power(value, divide(Fraction(1), degree))


def factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 2000:
        return Fraction(math.factorial(int(value)))
    if abs(_float(value)) > 10**5:
        raise OverflowError
    return mpmath.gamma(_float(value) + 1)


def binomial(above: Number, below: Number) -> Number:
    if all(isinstance(each, Fraction) and each.denominator == 1 and 0 <= each <= 10**4 for each in (above, below)):
        return Fraction(math.comb(int(above), int(below)))
    if max(abs(_float(above)), abs(_float(below))) > 10**5:
        raise OverflowError
    return mpmath.binomial(_float(above), _float(below))


def _apply(function: Callable[[Any], Any], value: Number) -> Number:
    if abs(_float(value)) > 10**9 and function is not mpmath.log:
        raise OverflowError
    return function(_float(value))


def _whole(rounding: Callable[[Any], Any], value: Number) -> Number:
    return Fraction(rounding(value)) if isinstance(value, Fraction) else rounding(_float(value))


# ---- reading --------------------------------------------------------------------------------------------------------


class _Parser:
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
            return _node(lambda value: _whole(math.floor if name == "lfloor" else math.ceil, value), inner)
        if name in ("abs", "floor", "ceil"):
            inner = self.argument(depth)
            whole = {"floor": math.floor, "ceil": math.ceil}.get(name)
            return _node(abs if whole is None else lambda value: _whole(whole, value), inner)
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
        value = _node(lambda number: _apply(function, number), inner)
        if base is not None:
            value = _node(divide, value, _node(lambda number: _apply(mpmath.log, number), base))
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
