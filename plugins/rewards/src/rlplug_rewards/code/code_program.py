"""Program of the process that runs a completion's code: a script of the standard library alone.

``python code_program.py run CODE`` runs the code of the file descriptor ``CODE`` as a program, with its own standard
input and output. ``python code_program.py serve CODE REQUESTS REPLIES`` runs it as a module, and then does what its
tests ask: each request is a line, the ``repr`` of a tuple, and so is each reply.

Nothing here is trusted by the process that tests: the code can replace all of it.
"""

from __future__ import annotations

import ast
import math
import sys
from typing import Any

MOST_LEVELS = 50
OPERATIONS: dict[str, Any] = {
    "call": lambda value, *arguments, **named: value(*arguments, **named),
    "get": getattr,
    "item": lambda value, key: value[key],
    "list": list,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def main() -> None:
    mode, code, *files = sys.argv[1:]
    with open(int(code), encoding="utf-8") as file:
        source = file.read()
    names: dict[str, Any] = {"__name__": "__main__" if mode == "run" else "solution"}
    if mode == "run":
        exec(compile(source, "<completion>", "exec"), names)
        return
    with open(int(files[0]), encoding="utf-8") as requests, open(int(files[1]), "w", encoding="utf-8") as replies:
        serve(source, names, requests, replies)


def serve(source: str, names: dict[str, Any], requests: Any, replies: Any) -> None:
    objects: list[Any] = []

    def reply(message: tuple[Any, ...]) -> None:
        replies.write(f"{message!r}\n")
        replies.flush()

    def shown(value: Any) -> tuple[Any, ...]:
        try:
            return ("value", literal(value, MOST_LEVELS))
        except ValueError:
            objects.append(value)
            return ("object", len(objects) - 1)

    try:
        exec(compile(source, "<completion>", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - SystemExit too
        reply(("error", type(error).__name__))
        return
    reply(("names", [(name, shown(value)) for name, value in names.items() if not name.startswith("__")]))
    for line in requests:
        operation, target, arguments, named = ast.literal_eval(line)
        given = [objects[value] if kind == "object" else ast.literal_eval(value) for kind, value in arguments]
        given_named = {
            name: objects[value] if kind == "object" else ast.literal_eval(value) for name, kind, value in named
        }
        try:
            reply(shown(OPERATIONS[operation](objects[target], *given, **given_named)))
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            reply(("error", type(error).__name__))


def literal(value: Any, levels: int) -> str:
    """Return a Python literal of plain data.

    Raises:
        ValueError: It is something else, or nested too deeply.
    """
    kind = type(value)
    if kind in (type(None), bool, int, str, bytes) or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is float and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if levels == 0:
        raise ValueError
    if kind is dict:
        items = [f"{literal(key, levels - 1)}: {literal(each, levels - 1)}" for key, each in value.items()]
        return "{" + ", ".join(items) + "}"
    if kind not in (list, tuple, set):
        raise ValueError
    inner = ", ".join(literal(each, levels - 1) for each in value)
    if kind is tuple:
        return f"({inner},)" if value else "()"
    if kind is set:
        return "{" + inner + "}" if value else "set()"
    return f"[{inner}]"


if __name__ == "__main__":
    main()
