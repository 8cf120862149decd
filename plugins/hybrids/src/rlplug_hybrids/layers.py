"""Layers with a state, found by their structure: convolutions in one dimension, delta nets, Mamba."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType
from typing import Any, Final, NamedTuple

from torch import nn

STATES: Final = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}
"""Methods of transformers' caches that only layers with a state call."""
BORDERS: Final = {"seq_idx", "cu_seqlens"}
"""Arguments by which kernels keep the sequences of a row apart."""
DECODE_ONLY: Final = ("update", "recurrent")
"""Parts of the names of functions that only decode with a cache, and so never see a packed row."""


class Kernel(NamedTuple):
    """A function that mixes tokens, for which transformers takes a package's kernel where it is installed."""

    package: str
    is_installed: bool
    takes_borders: bool
    cells: dict[str, Any]
    """Cells of transformers' wrapper by the names of its variables."""


def stateful_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with a state, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in network.named_modules():  # parents come first
        if not any(name.startswith(f"{parent}.") for parent in found) and has_state(module):
            found[name] = module
    return found


def has_state(module: nn.Module) -> bool:
    """Return whether a module stores a state in a cache, has a depthwise convolution in one dimension, or a decay."""
    names = {name for code in codes_of(type(module)) for name in code.co_names}
    convolves = any(isinstance(m, nn.Conv1d) and m.groups == m.in_channels > 1 for m in module.children())
    return bool(names & STATES) or convolves or "A_log" in module._parameters


def takes_borders(layer: nn.Module) -> bool:
    """Return whether all functions that mix this layer's tokens are kernels, get its arguments and take borders."""
    kernels, codes = kernels_of(type(layer)), list(codes_of(type(layer)))
    passes_on = any(code.co_flags & inspect.CO_VARKEYWORDS and set(code.co_names) & STATES for code in codes)
    return passes_on and bool(kernels) and all(kernel.is_installed and kernel.takes_borders for kernel in kernels)


def kernels_of(layer_class: type) -> list[Kernel]:
    """Return the kernels that a class calls while it trains."""
    namespace = vars(sys.modules[layer_class.__module__])
    found = []
    for name in sorted({name for code in codes_of(layer_class) for name in code.co_names}):
        function = namespace.get(name)
        if not inspect.isfunction(function) or any(part in name for part in DECODE_ONLY):
            continue
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "is_new_implementation" in cells:
            values = {variable: cell.cell_contents for variable, cell in cells.items()}
            knows = bool(BORDERS & {*values["applicable_params"]})
            found.append(Kernel(values["package"], values["is_new_implementation"], knows, cells))
    return found


@contextmanager
def without_kernels(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let the layers compute with transformers' functions in torch, since kernels take no tensors on the host."""
    changed = []
    for layer_class in {type(layer) for layer in layers}:
        for kernel in kernels_of(layer_class):
            in_torch = kernel.cells["torch_function"].cell_contents
            values = {"implementation": in_torch, "is_new_implementation": False}
            for name, value in (values | {"applicable_params": tuple(inspect.signature(in_torch).parameters)}).items():
                changed.append((kernel.cells[name], kernel.cells[name].cell_contents))
                kernel.cells[name].cell_contents = value
    try:
        yield
    finally:
        for cell, value in reversed(changed):
            cell.cell_contents = value


def read_weights(layer: nn.Module) -> set[str]:
    """Return the names of a layer's modules whose weight it reads itself, so that an adapter there adds nothing."""
    found = set()
    for code in codes_of(type(layer)):
        for first, second in pairwise(dis.get_instructions(code)):
            if second.opname == "LOAD_ATTR" and second.argval == "weight" and isinstance(first.argval, str):
                found.add(first.argval)
    return found & {name for name, _ in layer.named_children()}


def codes_of(layer_class: type) -> Iterator[CodeType]:
    """Yield the code of a class's methods, below any decorator."""
    for base in layer_class.__mro__:
        if issubclass(base, nn.Module) and base.__module__ != nn.Module.__module__:
            functions = (inspect.unwrap(f) for f in vars(base).values() if inspect.isfunction(f))
            yield from (function.__code__ for function in functions)
