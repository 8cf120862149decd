"""Environment variables around an engine's start, and what else its library changes of the trainer's process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch

TRAINER_VARIABLES: Final = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|PYTORCH_(CUDA_)?ALLOC_CONF|TORCHELASTIC_.*"
)


def is_trainer_variable(name: str) -> bool:
    """Return whether a variable is about the trainer's process alone: its rank, as torchrun says it, or its allocator.

    An engine's processes must not inherit them. They have ranks of their own, and memory that can be released and taken
    again needs an allocator without expandable segments.
    """
    return TRAINER_VARIABLES.fullmatch(name) is not None


@contextmanager
def environment_variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or remove those that are ``None``, and put the former values back at the end."""
    former = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(former)


@contextmanager
def process_kept() -> Iterator[None]:
    """Put all environment variables, ``sys.excepthook`` and torch's number of threads back at the end.

    Around the import and the start of a library in the trainer's process: processes that rewards and environments start
    later would inherit what it sets, such as ``LD_PRELOAD``.
    """
    variables, hook, threads = dict(os.environ), sys.excepthook, torch.get_num_threads()
    try:
        yield
    finally:
        _apply(dict.fromkeys(os.environ) | variables)
        sys.excepthook = hook
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@contextmanager
def recursion_limit_kept() -> Iterator[None]:
    """Put Python's recursion limit back at the end: torch.compile raises it whenever it compiles."""
    limit = sys.getrecursionlimit()
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
