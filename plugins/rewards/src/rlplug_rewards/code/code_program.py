"""Program of the process that runs a completion's code: a script of the standard library alone.

``python code_program.py run CODE`` runs the code of the file descriptor ``CODE`` as a program, with its own standard
input and output. ``python code_program.py serve CODE REQUESTS REPLIES`` runs it as a module, and then does what its
tests ask: each request is a line, and so is each reply (:mod:`rlplug_rewards.code.code_values`).

Nothing here is trusted by the process that tests: the code can replace all of it.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import types
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplug_rewards.code import code_values as values
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import code_values as values

    del sys.path[0]


def finish(value: Awaitable[Any]) -> Any:
    """Return what an awaitable gives, in the one event loop of the code's objects."""

    async def result() -> Any:
        return await value

    return event_loop().run_until_complete(result())


@functools.cache
def event_loop() -> Any:
    import asyncio  # as long as all the rest

    return asyncio.new_event_loop()


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda value, *arguments, **named: value(*arguments, **named),
    "make": lambda value, *arguments, **named: value(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "exit": lambda value: value.__exit__(None, None, None),
    "enter": lambda value: value.__enter__(),
    "await": finish,
    "aiter": lambda value: value.__aiter__(),
    "anext": lambda value: finish(value.__anext__()),
    "aenter": lambda value: finish(value.__aenter__()),
    "aexit": lambda value: finish(value.__aexit__(None, None, None)),
    "instance": lambda value, kind: isinstance(value, kind),
    **{
        name: getattr(operator, name)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv")
    },
    **{
        name: getattr(operator, name)
        for name in ("floordiv", "mod", "pow", "and_", "or_", "xor", "neg", "pos", "abs", "invert")
    },
    "reflected": lambda value, other, name: getattr(operator, name)(other, value),
    **{kind.__name__: kind for kind in (bool, str, int, float)},
    **{function.__name__: function for function in (len, repr, iter, next, hash)},
}


def main() -> None:
    mode, code, *files = sys.argv[1:]
    with open(int(code), encoding="utf-8") as file:
        source = file.read()
    names: dict[str, Any] = {"__name__": "__main__" if mode == "run" else "solution"}
    sys.set_int_max_str_digits(0)
    if mode == "run":
        exec(compile(source, "<completion>", "exec"), names)
        return
    with open(int(files[0]), encoding="utf-8") as requests, open(int(files[1]), "wb") as replies:
        Server(requests, replies).serve(source, names)


class Server:
    """What answers requests about the code's objects."""

    def __init__(self, requests: Any, replies: Any) -> None:
        self.requests, self.replies = requests, replies
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}

    def serve(self, source: str, names: dict[str, Any]) -> None:
        sys.modules["solution"] = module = type(sys)("solution")
        module.__dict__.update(names)
        try:
            exec(compile(source, "<completion>", "exec"), module.__dict__)
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            self.fail(error)
            return
        own = [(name, self.tree(value)) for name, value in module.__dict__.items() if not name.startswith("__")]
        self.reply(("names", own))
        while self.answer() is None:
            pass

    def reply(self, message: tuple[Any, ...]) -> None:
        self.replies.write(values.write(message))
        self.replies.flush()

    def fail(self, error: BaseException) -> None:
        message = ""
        with contextlib.suppress(Exception):
            message = str(error)[:1000]
        self.reply(("error", [kind.__name__ for kind in type(error).__mro__], message))

    def tree(self, value: Any) -> Any:
        return values.encode(value, self.number)

    def number(self, value: Any) -> tuple[Any, ...]:
        """Return what stands for an object: its number, with its kind where the tests can use that."""
        index = self.numbers.get(id(value))
        if index is None:
            index = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ("exception", index, [kind.__name__ for kind in value.__mro__])
        kinds = (("iterator", values.ITERATORS), ("coroutine", types.CoroutineType))
        return next((kind for kind, made in kinds if isinstance(value, made)), "object"), index

    def value(self, tree: Any) -> Any:
        return values.decode(tree, self.object)

    def object(self, tree: tuple[Any, ...]) -> Any:
        kind, index = tree[:2]
        if kind == "object":
            return self.objects[index]
        call = self.callback(index)

        async def call_async(*arguments: Any, **named: Any) -> Any:
            return call(*arguments, **named)

        return call_async if kind == "async callback" else call

    def callback(self, index: int) -> Callable[..., Any]:
        """Return a function that runs in the process that tests."""

        def call(*arguments: Any, **named: Any) -> Any:
            self.reply(("callback", index, self.tree(list(arguments)), self.tree(named)))
            while (outcome := self.answer()) is None:
                pass
            kind, result = outcome
            if kind == "raised":
                raise getattr(__import__("builtins"), result, RuntimeError)("in the function that the test gave")
            return self.value(result)

        return call

    def answer(self) -> tuple[str, Any] | None:
        """Do what the next line asks, or return the outcome of a callback; the process ends with the requests."""
        line = self.requests.readline()
        if not line:
            raise SystemExit
        operation, *rest = values.read(line)
        if operation in ("returned", "raised"):
            return operation, rest[0]
        target, arguments, named = rest
        try:
            given = [self.value(each) for each in arguments]
            given_named = {name: self.value(each) for name, each in named}
            result = OPERATIONS[operation](self.objects[target], *given, **given_named)
            changed = [
                self.tree(each) if values.has_mutable(each) else None for each in [*given, *given_named.values()]
            ]
            is_object = operation == "make" and type(result).__module__ == "solution"
            self.reply(("value", self.number(result) if is_object else self.tree(result), changed))
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            self.fail(error)
        return None


if __name__ == "__main__":
    main()
