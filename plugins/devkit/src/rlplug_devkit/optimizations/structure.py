"""What a model is made of, in texts that can be compared: how an edit shows that a user cannot see."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

DEPTH: Final = 4
"""How deep the attributes of attributes are looked at."""
OF_MODULES: Final = ("_parameters", "_buffers", "_modules")


def structure_of(model: nn.Module) -> dict[str, str]:
    """Return each module's class, attributes, hooks and state of sharding, by names with dots."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        where = name or "the model"
        found[where] = type(module).__qualname__
        found |= {f"{where}.{key}": _text(value, DEPTH) for key, value in vars(module).items() if key not in OF_MODULES}
        found |= {f"{where}.{key}": str(value.requires_grad) for key, value in module.named_parameters(recurse=False)}
        get_state = getattr(module, "_get_fsdp_state", None)
        if get_state is not None:
            found[f"{where}, sharded"] = _text(get_state(), DEPTH)
    return found


def functions_of(model: nn.Module) -> dict[str, int]:
    """Return the ids of the functions of all classes of ``transformers`` that a model is made of, by name."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    return {
        f"{each.__module__}.{each.__qualname__}.{name}": id(value)
        for each in classes
        if each.__module__.startswith("transformers.")
        for name, value in vars(each).items()
        if inspect.isfunction(value)
    }


def is_plain(text: str) -> bool:
    """Return whether :func:`structure_of` describes a value so that is nothing, a truth, a number or a text."""
    return text in ("None", "True", "False") or text[:1] in "'\"-0123456789"


@contextmanager
def attributes_read(model: nn.Module) -> Iterator[set[str]]:
    """Collect the attributes of modules that are read meanwhile, by names as in :func:`structure_of`."""
    found: set[str] = set()
    modules = list(model.named_modules())
    classes = [type(module) for _, module in modules]
    for name, module in modules:
        module.__class__ = _reading(type(module), name or "the model", found)
    try:
        yield found
    finally:
        for (_, module), own in zip(modules, classes, strict=True):
            module.__class__ = own


def _reading(own: type, where: str, found: set[str]) -> Any:
    def read(self: Any, name: str) -> Any:
        found.add(f"{where}.{name}")
        return super(made, self).__getattribute__(name)

    made: Any = type(own.__name__, (own,), {"__getattribute__": read, "__module__": own.__module__})
    return made


def _text(value: Any, depth: int) -> str:
    """Return a value without addresses; the same for two values that were made alike."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, functools.partial):
        return f"partial of {_text(value.func, depth)}"
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__qualname__
    if isinstance(value, ModuleType):
        return value.__name__
    if depth == 0 or isinstance(value, RemovableHandle):  # whose id counts the hooks of the process
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return f"{type(value).__qualname__} of {[_text(each, depth - 1) for each in value.values()]}"
    if isinstance(value, Sequence | set | frozenset):
        return f"{type(value).__qualname__} of {sorted(_text(each, depth - 1) for each in value)}"
    attributes = getattr(value, "__dict__", {})
    return f"{type(value).__qualname__} with { ({key: _text(each, depth - 1) for key, each in attributes.items()}) }"
