"""Reader of MiniMax M3's calls, whose arguments are nested elements with one mark in front of each of their tags.

``]<]minimax[>[<invoke name="f">]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[</invoke>``: the name of an element is
that of an argument or a key, and the elements of a list are named ``item``. A tag without the mark is text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from rlplug_sandbox.call_records import (
    MAX_CALLS,
    AnyCall,
    MalformedCall,
    Parameters,
    Unreadable,
    checked,
    malformed,
    quoted,
    typed,
)
from rlplug_sandbox.tool_schema import fits

INVOKE: Final = re.compile(r"\]<\]minimax\[>\[\s*<invoke\s+name\s*=\s*[\"']?(?P<name>[^\n>\"']{1,200})[\"']?\s*>")
TAG: Final = re.compile(r"\]<\]minimax\[>\[\s*<(?P<end>/?)(?P<name>[^\n<>]{1,200})>")
ENDS: Final = ("invoke", "tool_call")
"""Names in closing tags that end a call."""
MAX_DEPTH: Final = 100
"""Most elements that may be open."""


@dataclass
class Element:
    """Element with its text, or with the elements in it."""

    name: str
    text: str = ""
    children: list[Element] = field(default_factory=list)


def read_elements(text: str, parameters: Parameters) -> list[AnyCall]:
    """Return the calls of a turn, each up to the next one's beginning or its own end."""
    calls: list[AnyCall] = []
    heads = list(islice(INVOKE.finditer(text), MAX_CALLS + 1))
    ends = [*(head.start() for head in heads), len(text)][1:]
    for head, end in zip(heads, ends, strict=True):
        name = head["name"].strip()
        try:
            root = _tree(text[head.end() : end])
            schemas = parameters.get(name)
            schema = None if schemas is None else {"type": "object", "properties": schemas}
            calls.append(checked(name, _value(root, schema) if root.children else {}))
        except Unreadable as error:
            calls.append(malformed(str(error), name))
    return calls or [MalformedCall('a call must be ]<]minimax[>[<invoke name="name">, its arguments, and its end')]


def _tree(text: str) -> Element:
    """Return an element whose children are the arguments of a call; what stands behind the call's end is left out."""
    open_elements = [root := Element("")]
    position = 0
    for tag in TAG.finditer(text):
        name, current = tag["name"].strip(), open_elements[-1]
        current.text += text[position : tag.start()]
        position = tag.end()
        if not tag["end"]:
            if len(open_elements) > MAX_DEPTH:
                raise Unreadable(f"the call has more than {MAX_DEPTH} elements within each other")
            current.children.append(Element(name))
            open_elements.append(current.children[-1])
        elif name == current.name:
            open_elements.pop()
        elif current is root and name not in ENDS:
            raise Unreadable(f"the call closes {quoted(name)}, which is not open")
        else:
            break
    else:
        open_elements[-1].text += text[position:]
    if open_elements[-1] is not root:
        raise Unreadable(f"the argument {quoted(open_elements[-1].name)} is not closed")
    if rest := root.text.strip():
        raise Unreadable(f"the call has {quoted(rest)} where ]<]minimax[>[<name> belongs")
    return root


def _value(element: Element, schema: Mapping[str, Any] | None) -> Any:
    """Return what an element stands for: a list or an object where it has elements, else the value of its text.

    Args:
        schema: JSON schema of the value; ``None`` if unknown.
    """
    kind, inner = _container(schema or {})
    children = element.children
    if not children:
        text = element.text.removeprefix("\n").removesuffix("\n")
        if kind and not text.strip() and not fits(text, schema or {}):
            return [] if kind == "array" else {}
        return typed(text, schema)
    if element.text.strip():
        raise Unreadable(f"the argument {quoted(element.name)} has text beside its elements")
    if kind == "array" or (not kind and all(child.name == "item" for child in children)):
        return [_value(child, _known(inner.get("items"), schema)) for child in children]
    properties, others = inner.get("properties") or {}, inner.get("additionalProperties")
    values: dict[str, Any] = {}
    for child in children:
        if child.name in values:
            raise Unreadable(f"the argument {quoted(child.name)} is given twice")
        values[child.name] = _value(child, _known(properties.get(child.name, others), schema))
    return values


def _known(inner: Any, outer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the schema of a value within another; one that says nothing where there is none, such as ``true``."""
    return inner if isinstance(inner, Mapping) else None if outer is None else {}


def _container(schema: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return ``array`` or ``object``, whichever a schema allows first, and that schema; an empty text for neither."""
    kinds = schema.get("type", ())
    for kind in ("array", "object"):
        if kind == kinds or kind in (kinds if isinstance(kinds, list) else ()):
            return kind, schema
    options = (_container(option) for option in schema.get("anyOf", ()))
    return next((found for found in options if found[0]), ("", {}))
