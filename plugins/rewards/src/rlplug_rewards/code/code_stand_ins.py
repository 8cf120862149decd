"""Stand-ins for objects of the code's process, for the tests of :mod:`rlplug_rewards.code.code_checker`.

A stand-in is used through requests: calls, attributes, items, iteration, and operators between two stand-ins. With
plain data it is never equal and in no order, and no value comes of an operator between them: else an object of the code
could decide a comparison with what is expected of it. An object that the test itself makes, of a class that it uses as
one, is compared by its own methods, which are what such a test is about. It uses the standard library alone.
"""

from __future__ import annotations

import builtins
import os
import select
import sys
import time
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rlplug_rewards.code import code_values as values
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import code_values as values

    del sys.path[0]

MOST_BYTES = 1 << 23
"""Longest reply."""
STRANGE = "the code's process answered with what is no reply"
CODE, CLASS, TEST, MIXED = "code", "class", "test", "mixed"
"""Origins of a stand-in: the code, a class that tests call, the test that called it, an operator with plain data."""
NO_VALUE = "no value comes of an object of the code and plain data, which may be what is expected of it"
CO_COROUTINE = 0x80
OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
COMPARISONS = ("lt", "le", "gt", "ge")


class Solution:
    """The code in its process.

    Args:
        requests: File that requests are written to.
        replies: File that replies are read from.
        ends_at: Time on the monotonic clock after which a reply is late.
    """

    def __init__(self, requests: Any, replies: Any, ends_at: float) -> None:
        self._requests, self._replies, self._ends_at = requests, replies, ends_at
        self._rest = b""
        self._exceptions: dict[str, type[Exception]] = {}
        self._callbacks: list[Callable[..., Any]] = []

    def names(self, classes: Sequence[str] = ()) -> dict[str, Any]:
        """Return what the code defines, by name; ``classes`` are names that the tests use as classes."""
        found = self._reply()
        if found[0] == "error":
            self._raise(*found[1:])
        if found[0] != "names" or not isinstance(found[1], list):
            raise ValueError(STRANGE)
        named = {str(name): self._value(tree) for name, tree in found[1]}
        for name, value in named.items():
            if isinstance(value, StandIn) and name in classes:
                object.__setattr__(value, "_origin", CLASS)
        return named

    def ask(self, operation: str, target: int, *arguments: Any, **named: Any) -> Any:
        """Return what an operation on one of the code's objects gives; what it changes in its arguments is changed
        here.

        Raises:
            Exception: What the code raised: a class of Python's own or of the code, otherwise ``RuntimeError``.
        """
        if operation not in ("reflected", *OPERATORS) and any(map(is_mixed, (*arguments, *named.values()))):
            raise TypeError(NO_VALUE)
        given = [self._tree(value) for value in arguments]
        given_named = [(name, self._tree(value)) for name, value in named.items()]
        self._requests.write(values.write((operation, target, given, given_named)))
        found = self._reply()
        while found[0] == "callback":
            self._run_callback(*found[1:])
            found = self._reply()
        if found[0] == "error":
            self._raise(*found[1:])
        kind, tree, changed = found
        if kind != "value":
            raise ValueError(STRANGE)
        for old, new in zip([*arguments, *named.values()], changed, strict=True):
            if new is not None:
                _update(old, self._value(new))
        return self._value(tree)

    def _run_callback(self, index: int, arguments: Any, named: Any) -> None:
        """Call a function of the test for the code."""
        try:
            result = _finished(self._callbacks[index](*self._value(arguments), **self._value(named)))
            answer = ("returned", self._tree(result))
        except Exception as error:  # noqa: BLE001 - the code may catch what the function raises
            answer = ("raised", type(error).__name__)
        self._requests.write(values.write(answer))

    def _tree(self, value: Any) -> Any:
        return values.encode(value, self._other)

    def _other(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, StandIn):
            return ("object", number_of(value))
        if isinstance(value, type) and value in self._exceptions.values():
            return ("object", value._number)  # type: ignore[attr-defined]
        if not callable(value):
            value = iter(value).__next__ if isinstance(value, values.ITERATORS) else None
        if value is None:
            raise TypeError("the test gives the code an object of its own")
        self._callbacks.append(value)
        is_async = getattr(getattr(value, "__code__", None), "co_flags", 0) & CO_COROUTINE
        return ("async callback" if is_async else "callback", len(self._callbacks) - 1)

    def _value(self, tree: Any) -> Any:
        return values.decode(tree, self._stand_in)

    def _stand_in(self, tree: tuple[Any, ...]) -> Any:
        kind, index, *rest = tree
        if kind == "exception":
            return self._exception(index, rest[0])
        if kind not in ("object", "iterator", "coroutine") or not isinstance(index, int):
            raise ValueError(STRANGE)
        made = (Coroutine if kind == "coroutine" else StandIn)(self, index)
        return _iterate(made) if kind == "iterator" else made

    def _exception(self, index: int, names: Sequence[str]) -> type[Exception]:
        """Return a class in place of an exception of the code, so that tests can catch it."""
        name = str(names[0])
        if name not in self._exceptions:
            self._exceptions[name] = type(name, (_builtin_exception(names),), {"_number": index})
        return self._exceptions[name]

    def _raise(self, names: Sequence[str], message: str) -> NoReturn:
        kind = next((self._exceptions[name] for name in names if name in self._exceptions), None) or _builtin_exception(
            names
        )
        try:
            error = kind(str(message))
        except TypeError:  # some need more arguments
            error = RuntimeError(f"the completion's code raised {names[0]}")
        raise error

    def _reply(self) -> tuple[Any, ...]:
        poller = select.poll()
        poller.register(self._replies, select.POLLIN)
        while b"\n" not in self._rest:
            wait(poller, self._ends_at)
            part = self._replies.read(65536)
            self._rest += part
            if not part or len(self._rest) > MOST_BYTES:
                raise ValueError(STRANGE)
        line, _, self._rest = self._rest.partition(b"\n")
        found = values.read(line)
        if not isinstance(found, tuple) or len(found) < 2:
            raise ValueError(STRANGE)
        return found


def wait(poller: select.poll, ends_at: float) -> list[tuple[int, int]]:
    """Return the files that are ready.

    Raises:
        TimeoutError: None is until ``ends_at``.
    """
    left = ends_at - time.monotonic()
    found = poller.poll(left * 1000) if left > 0 else []
    if not found:
        raise TimeoutError("the code is late")
    return found


def _update(old: Any, new: Any) -> None:
    if isinstance(old, tuple):
        for left, right in zip(old, new, strict=False):
            _update(left, right)
    else:
        values.update(old, new)


def _builtin_exception(names: Sequence[str]) -> type[Exception]:
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind
    return RuntimeError


def _finished(result: Any) -> Any:
    """Return what a function of the test gave to the code, or what it gives in the end, in an event loop of its own."""
    if not isinstance(result, types.CoroutineType):
        return result
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:  # the test may itself run in an event loop
        return pool.submit(asyncio.run, result).result()


def _iterate(made: StandIn) -> Iterator[Any]:
    """Return a generator over an iterator of the code."""
    while True:
        try:
            value = next(made)
        except StopIteration:
            return
        yield value


class StandIn:
    """Stand-in for an object of the code's process."""

    def __init__(self, solution: Solution, number: int) -> None:
        object.__setattr__(self, "_remote", (solution, number))
        object.__setattr__(self, "_origin", CODE)

    def _ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        if is_mixed(self) and operation not in ("reflected", *OPERATORS):
            raise TypeError(NO_VALUE)
        solution, number = object.__getattribute__(self, "_remote")
        return solution.ask(operation, number, *arguments, **named)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if origin_of(self) != CLASS:
            return self._ask("call", *arguments, **named)
        return _of_origin(self._ask("make", *arguments, **named), TEST)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__", "__class__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        self._ask("delitem", key)

    def __contains__(self, key: Any) -> bool:
        if origin_of(self) == TEST:
            return bool(self._ask("contains", key))
        return any(each is key or each == key for each in self)

    def __iter__(self) -> Iterator[Any]:
        found = self._ask("iter")
        return found if not isinstance(found, StandIn) else _iterate(found)

    def __next__(self) -> Any:
        return self._ask("next")

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(self, *_: object) -> None:
        self._ask("exit")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StandIn):
            return number_of(self) == number_of(other) or self._ask("eq", other) is True
        return origin_of(self) == TEST and self._ask("eq", other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(number_of(self))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, StandIn) and instance._ask("instance", self) is True

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __int__(self) -> int:
        return int(self._ask("int"))

    def __float__(self) -> float:
        return float(self._ask("float"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __neg__(self) -> Any:
        return self._ask("neg")

    def __abs__(self) -> Any:
        return self._ask("abs")

    def __aiter__(self) -> Any:
        return self._ask("aiter")

    async def __anext__(self) -> Any:
        return self._ask("anext")

    async def __aenter__(self) -> Any:
        return self._ask("aenter")

    async def __aexit__(self, *_: object) -> None:
        self._ask("aexit")


class Coroutine(StandIn):
    """Stand-in for a coroutine of the code, which runs whole, in the code's own event loop, when a test waits for it.

    It is one for ``asyncio.run`` by its methods.
    """

    def __next__(self) -> NoReturn:
        raise StopIteration(self._ask("await"))

    def send(self, _: object) -> NoReturn:
        next(self)

    def throw(self, error: Any, *_: object) -> NoReturn:
        raise error

    def close(self) -> None:
        """Do nothing: it is never in the middle."""

    def __await__(self) -> Generator[None, None, Any]:
        return self._ask("await")
        yield  # which makes this the generator that Python asks for


def number_of(made: StandIn) -> int:
    """Return the number of a stand-in's object."""
    number: int = object.__getattribute__(made, "_remote")[1]
    return number


def origin_of(made: StandIn) -> str:
    """Return where an object comes from: ``CODE``, ``CLASS``, ``TEST`` or ``MIXED``."""
    origin: str = object.__getattribute__(made, "_origin")
    return origin


def is_mixed(value: Any) -> bool:
    """Return whether a value is a stand-in of which nothing but another may come."""
    return isinstance(value, StandIn) and origin_of(value) == MIXED


def _of_origin(value: Any, origin: str) -> Any:
    if isinstance(value, StandIn):
        object.__setattr__(value, "_origin", origin)
    return value


def _operator(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: StandIn, other: Any) -> Any:
        return _result(self, other, self._ask(name, other))

    def reflected(self: StandIn, other: Any) -> Any:
        return _result(self, other, self._ask("reflected", other, name))

    return forward, reflected


def _result(one: StandIn, other: Any, result: Any) -> Any:
    """Return the result of an operator; with plain data it must be an object, or it could be what a test expects."""
    if origin_of(one) == TEST:
        return _of_origin(result, TEST)
    if isinstance(other, StandIn) and MIXED not in (origin_of(one), origin_of(other)):
        return result
    if not isinstance(result, StandIn):
        raise TypeError("an operator between an object of the code and plain data gave plain data")
    return _of_origin(result, MIXED)


def _comparison(name: str) -> Callable[[StandIn, Any], Any]:
    def compare(self: StandIn, other: Any) -> Any:
        return self._ask(name, other) if isinstance(other, StandIn) or origin_of(self) == TEST else NotImplemented

    return compare


for _name in OPERATORS:
    _forward, _reflected = _operator(_name)
    setattr(StandIn, f"__{_name.strip('_')}__", _forward)
    setattr(StandIn, f"__r{_name.strip('_')}__", _reflected)
for _name in COMPARISONS:
    setattr(StandIn, f"__{_name}__", _comparison(_name))
