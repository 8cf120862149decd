"""Checks of the servers that a run names, of those that it starts, and of what they answer about themselves."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch

from rlplug.errors import ConfigError, RLPlugError, describe
from rlplug.interfaces import EngineFault, FP8Weights, Placement
from rlplug_engines.servers.addresses import is_loopback
from rlplug_engines.servers.backend import EngineLabels


def changed_options(options: Any) -> set[str]:
    """Return the fields of a dataclass that are not at their defaults."""
    defaults = type(options)()
    return {f.name for f in fields(defaults) if getattr(options, f.name) != getattr(defaults, f.name)}


def check_urls(urls: Sequence[str], key_variable: str, labels: EngineLabels, also_set: Collection[str]) -> None:
    """Check the options about servers that run already.

    Args:
        key_variable: Environment variable of their key.
        also_set: Options that say how servers are started.

    Raises:
        ConfigError: They cannot be called, or others than the trainer could, or ``also_set`` names something.
    """
    if not urls:
        raise ConfigError("rollout.urls is empty: name a server, or leave it out to have some started.")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.urls has {url!r}: write http://HOST:PORT.")
        if not is_loopback(url) and not os.environ.get(key_variable):
            raise ConfigError(
                f"rollout.urls has {url}, which others can reach, and the environment variable {key_variable} "
                f"(rollout.api_key_env) is not set: put the server's {labels.server_key} into it."
            )
    if also_set:
        raise ConfigError(
            f"rollout.{min(also_set)} is set, and the servers at rollout.urls run already: set it where they are "
            "started, and remove it here."
        )


def devices_of_servers(
    gpus: Sequence[int] | None, size: int, placement: Placement, labels: EngineLabels
) -> list[str | None]:
    """Return what each server that is started sees as ``CUDA_VISIBLE_DEVICES``.

    Args:
        gpus: Indices among the GPUs that the trainer sees.
        size: GPUs of a server.

    Raises:
        ConfigError: They are not those of whole servers.
    """
    gpus = gpus or []
    if not gpus or len(gpus) % size or len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"rollout.gpus is {gpus or None}, and each server takes {size} ({labels.gpus_per_server}): list GPUs for "
            "one or more servers, each GPU once, or set rollout.urls."
        )
    if max(gpus) >= torch.cuda.device_count():
        raise ConfigError(f"rollout.gpus is {gpus}, and the trainer sees {torch.cuda.device_count()} GPUs.")
    if placement.device.index in gpus:
        warnings.warn(
            f"rollout.gpus has {placement.device.index}, on which the trainer runs too: give it to one of both alone, "
            f"or use {labels.colocated}.",
            stacklevel=2,
        )
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
    return [",".join(names[gpu] for gpu in gpus[i : i + size]) for i in range(0, len(gpus), size)]


def check_server_fp8(engine: str, url: str, found: Any, fp8: FP8Weights | None, flag: str) -> None:
    """Check that a server has those layers in FP8 whose weights will travel so.

    Args:
        engine: Its name, for messages.
        found: The server's ``quantization_config``.
        flag: The server's flag that holds it.

    Raises:
        ConfigError: It has others.
    """
    needed = None if fp8 is None else fp8.quantization_config()
    if found == needed:
        return
    remedy = f"without a quantization_config in its {flag}"
    if needed is not None:
        remedy = f"with {flag} '{json.dumps({'quantization_config': needed})}'"
    raise ConfigError(f"{engine} at {url} has other layers in FP8 than model.weight_sync sends: start it {remedy}.")


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Raise errors of reading a server's answer as those of the server.

    Raises:
        EngineFault: The answer lacks a field, or has one of another type.
    """
    try:
        yield
    except RLPlugError:
        raise
    except (KeyError, IndexError) as problem:
        raise EngineFault(f"{url} sent an answer that lacks {describe(problem, with_line=True)}.") from problem
    except Exception as problem:
        raise EngineFault(f"{url} sent an answer of another form: {describe(problem, with_line=True)}.") from problem
