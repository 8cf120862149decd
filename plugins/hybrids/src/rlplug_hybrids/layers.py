"""Layers with a state, found by their structure: convolutions in one dimension, delta nets, Mamba."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import CellType, CodeType
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
    is_used: bool
    """Whether calls reach the package's kernel, and not the function in torch"""
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


def block_of(network: nn.Module, name: str) -> nn.Module:
    """Return the outermost module of a list that contains the named one: a transformer block."""
    module = network
    for part in name.split("."):
        if isinstance(module, nn.ModuleList):
            return module[int(part)]
        module = getattr(module, part)
    return module


def has_state(module: nn.Module) -> bool:
    """Return whether a module stores a state in a cache, has a depthwise convolution in one dimension, or a decay."""
    names = {name for code in codes_of(type(module)) for name in code.co_names}
    convolves = any(isinstance(m, nn.Conv1d) and m.groups == m.in_channels > 1 for m in module.children())
    return bool(names & STATES) or convolves or "A_log" in module._parameters


def takes_borders(layer: nn.Module) -> bool:
    """Return whether all functions that mix this layer's tokens are kernels, get its arguments and take borders."""
    kernels, codes = kernels_of(type(layer)), list(codes_of(type(layer)))
    passes_on = any(code.co_flags & inspect.CO_VARKEYWORDS and set(code.co_names) & STATES for code in codes)
    return passes_on and bool(kernels) and all(kernel.is_used and kernel.takes_borders for kernel in kernels)


def kernels_of(layer_class: type, with_decoding: bool = False) -> list[Kernel]:
    """Return the kernels that a class calls while it trains, or also those with which it only decodes."""
    namespace = vars(sys.modules[layer_class.__module__])
    found = []
    for name in sorted({name for code in codes_of(layer_class) for name in code.co_names}):
        function = namespace.get(name)
        if not inspect.isfunction(function) or (not with_decoding and any(part in name for part in DECODE_ONLY)):
            continue
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if "is_new_implementation" in cells:
            values = {variable: cell.cell_contents for variable, cell in cells.items()}
            knows = bool(BORDERS & {*values["applicable_params"]})
            is_used = values["implementation"] is not values["torch_function"]
            found.append(Kernel(values["package"], is_used, knows, cells))
    return found


@contextmanager
def without_kernels(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let layers compute in torch for a while; see :func:`compute_in_torch`."""
    changed = compute_in_torch(layers)
    try:
        yield
    finally:
        for cell, value in reversed(changed):
            cell.cell_contents = value


def compute_in_torch(layers: Iterable[nn.Module]) -> list[tuple[CellType, Any]]:
    """Let all layers of these classes compute with transformers' functions in torch, since kernels need a GPU.

    Returns:
        The cells that were changed, each with what it had.
    """
    changed = []
    for layer_class in {type(layer) for layer in layers}:
        for kernel in kernels_of(layer_class, with_decoding=True):
            in_torch = kernel.cells["torch_function"].cell_contents
            parameters = tuple(inspect.signature(in_torch).parameters)
            for name, value in (("implementation", in_torch), ("applicable_params", parameters)):
                changed.append((kernel.cells[name], kernel.cells[name].cell_contents))
                kernel.cells[name].cell_contents = value
    return changed


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
