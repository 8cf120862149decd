"""What says which servers an engine uses, and what those say of themselves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from rlplug.errors import ConfigError
from rlplug.interfaces import Placement
from rlplug.rollout.servers.addresses import is_loopback


@dataclass(frozen=True)
class EngineLabels:
    """What messages of one engine say."""

    engine: str
    """Such as ``vLLM``."""
    colocated: str
    """The engine's class for the trainer's own GPUs."""
    server_key: str
    """What its servers call their key."""
    gpus_per_server: str
    """The options that say how many GPUs a server takes."""
    noise: tuple[str, ...] = ()
    """Beginnings of lines of its log that say nothing of a server's end."""
    max_num_seqs_key: str = "rollout.max_num_seqs"
    """The option that says how many requests run at once, for advice."""
    memory_key: str = "rollout.gpu_memory_utilization (or kv_cache_gib)"
    """The option that makes the KV cache larger, for advice."""


@dataclass(frozen=True)
class ServerSettings:
    """Of the engines behind one URL."""

    max_model_len: int
    """Prompt and completion together, in tokens."""
    max_num_seqs: int
    """Requests that run at once, over all copies of the model."""
    kv_cache_tokens: int
    """Over all copies of the model."""


def changed_options(options: Any) -> set[str]:
    """Return the fields of a dataclass that are not at their defaults."""
    defaults = type(options)()
    return {f.name for f in fields(defaults) if getattr(options, f.name) != getattr(defaults, f.name)}


def check_urls(urls: Sequence[str], key_variable: str, words: EngineLabels, also_set: Collection[str]) -> None:
    """Check what was written about servers that run already.

    Args:
        key_variable: Environment variable of their key.
        also_set: Options that say how servers are started.

    Raises:
        ConfigError: They cannot be asked, or others than the trainer could, or ``also_set`` names something.
    """
    if not urls:
        raise ConfigError("rollout.urls is empty: name a server, or leave it out to have some started.")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"rollout.urls has {url!r}: write http://HOST:PORT.")
        if not is_loopback(url) and not os.environ.get(key_variable):
            raise ConfigError(
                f"rollout.urls has {url}, which others can reach, and the environment variable {key_variable} "
                f"(rollout.api_key_env) is not set: put the server's {words.server_key} into it."
            )
    if also_set:
        raise ConfigError(
            f"rollout.{min(also_set)} is set, and the servers at rollout.urls run already: set it where they are "
            "started, and remove it here."
        )


def devices_of_servers(
    gpus: Sequence[int] | None, size: int, placement: Placement, words: EngineLabels
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
            f"rollout.gpus is {gpus or None}, and each server takes {size} ({words.gpus_per_server}): list GPUs for "
            "one or more servers, each GPU once, or set rollout.urls."
        )
    if max(gpus) >= torch.cuda.device_count():
        raise ConfigError(f"rollout.gpus is {gpus}, and the trainer sees {torch.cuda.device_count()} GPUs.")
    if placement.device.index in gpus:
        warnings.warn(
            f"rollout.gpus has {placement.device.index}, on which the trainer runs too: give it to one of both alone, "
            f"or use {words.colocated}.",
            stacklevel=2,
        )
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(index) for index in range(torch.cuda.device_count())]
    return [",".join(names[gpu] for gpu in gpus[i : i + size]) for i in range(0, len(gpus), size)]
