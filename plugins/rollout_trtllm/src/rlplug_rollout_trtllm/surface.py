"""The names of TensorRT-LLM that this plugin uses, and how an installed engine differs from them.

``surface.json`` is a small copy of the contract of the 1.3 line, read in its public sources and documentation.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_CONTRACT: Final[Mapping[str, Any]] = json.loads(Path(__file__).with_name("surface.json").read_text())

PLACING: Final[Sequence[str]] = _CONTRACT["placing"]
"""Keywords of ``AsyncLLM`` itself, beside those of its arguments."""
LLM_ARGS: Final = frozenset[str](_CONTRACT["arguments"])
"""Arguments of an engine."""
SYMBOLS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = _CONTRACT["symbols"]
"""Names by module, each with its keywords, fields, members and methods that the plugin uses; of ``ExecutorMemoryType``,
the members, by value, that a model has without drafts and grammars."""
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = _CONTRACT["defaults"]
"""Defaults as the plugin knows them. It sets all but ``tokens_per_block`` itself."""

SLEEPING_WEIGHTS: Final = "model_weights"
SLEEPING_CACHE: Final = "kv_cache"
EXTENSION: Final = "rlplug_rollout_trtllm.worker_extension.RLPlugWorkerExtension"
"""What the engine's workers load, by name: a subclass of its ``WorkerExtension``."""


def differences() -> list[str]:
    """Return in words how the installed TensorRT-LLM differs from these names; an empty list where it does not."""
    found: list[str] = []
    for module, symbols in SYMBOLS.items():
        try:
            imported = importlib.import_module(module)
        except ImportError as problem:
            found.append(f"no module {module}: {problem}")
            continue
        for name, members in symbols.items():
            symbol = getattr(imported, name, None)
            found += [f"{module} has no {name}"] if symbol is None else _of_symbol(name, symbol, members)
    return found


def argument_names() -> set[str]:
    """Return the names of the engine's arguments: those of the contract, and those that the installed one lists.

    Where TensorRT-LLM is not installed, as on a trainer's host whose engines are elsewhere, those of the contract.
    """
    return set(LLM_ARGS) | (_installed_arguments() or set() if importlib.util.find_spec("tensorrt_llm") else set())


def _installed_arguments() -> set[str] | None:
    """Return the arguments that the installed engine itself lists; ``None`` where it has no such list."""
    arguments = getattr(importlib.import_module("tensorrt_llm.llmapi.llm_args"), "TorchLlmArgs", None)
    return None if arguments is None else set(arguments.model_fields)


def _of_symbol(name: str, symbol: Any, members: Collection[str]) -> Iterator[str]:
    for member in members:
        method, is_method, parameters = member.rstrip(")").partition("(")
        if not is_method:
            yield from () if _has(symbol, member) else (f"{name} has no {member!r}",)
        elif (found := getattr(symbol, method, None)) is None:
            yield f"{name} has no method {method}"
        else:
            yield from (f"{name}.{method} takes no {p!r}" for p in parameters.split(", ") if p and not _has(found, p))
    if name == "AsyncLLM" and (known := _installed_arguments()) is not None:
        yield from (f"AsyncLLM takes no argument {argument!r}" for argument in sorted(LLM_ARGS - known))
    fresh = symbol() if name in DEFAULTS else None
    for field, expected in DEFAULTS.get(name, {}).items():
        if (default := getattr(fresh, field, expected)) != expected:
            yield f"{name}.{field} is {default!r} by default, and was {expected!r}"


def _has(symbol: Any, name: str) -> bool:
    """Say whether an enumeration has a member, by its name or value, or a class or function takes a keyword."""
    if isinstance(symbol, enum.EnumMeta):
        members: Collection[Any] = list(symbol)
        return any(name in (member.name, member.value) for member in members)
    if hasattr(symbol, "model_fields"):
        return name in symbol.model_fields
    parameters = inspect.signature(symbol).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
