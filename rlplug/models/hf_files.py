"""Files of a Hugging Face folder or Hub repository, with errors that name the one that is missing.

``path`` is the folder or name, and ``key`` the model's key in the run's configuration, for messages.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, get_session, try_to_load_from_cache
from transformers import AutoConfig, GenerationConfig

from rlplug.errors import ConfigError, describe

_FIELD: Final = re.compile(r"Field '(\w+)'.*?value:? (.+?)(?: doesn't match|\)|$)")  # of config.json
_CLASS: Final = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_COUNTS: Final = re.compile("num_hidden_layers|(hidden|intermediate|vocab)_size|head_dim|max_position_embeddings")
MOST_LAYERS: Final = 10_000
HUB_S: Final = 4.0
"""Longest wait for the Hugging Face Hub, in seconds; looking up its address may take as long again."""


def check_folder(path: str, key: str) -> None:
    """Raise an error for a folder that does not exist, and for a name that is not cached on a Hub out of reach."""
    if Path(path).is_dir():
        return
    if path.count("/") > 1 or path.startswith((".", "/", "~")):  # no name on a Hub
        raise ConfigError(f"{key}.path: the folder {path!r} does not exist. Give one that does; ~ is ${{HOME}}.")
    state = "is not asked, as HF_HUB_OFFLINE says"
    if not constants.HF_HUB_OFFLINE and not hub_is_reachable():
        state = "cannot be reached"
        constants.HF_HUB_OFFLINE = True  # what is in the cache is read without asking, and retrying, for each file
    cached = read(path, key, "configuration", try_to_load_from_cache, path, "config.json")
    if constants.HF_HUB_OFFLINE and not isinstance(cached, str):
        raise ConfigError(
            f"{key}.path {path!r}: no folder has that name, it is not in the Hugging Face Hub's cache, and the Hub at "
            f"{constants.ENDPOINT} {state}. Give a folder, or download the model where there is a network."
        )


@functools.cache
def hub_is_reachable() -> bool:
    """Return whether the Hugging Face Hub answers within seconds; its own client would retry for minutes."""
    answers: list[Any] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_S))

    asking = threading.Thread(target=ask, daemon=True)  # a name's address is looked up without a deadline
    asking.start()
    asking.join(2 * HUB_S)
    return bool(answers)


def pretrained(make: Callable[..., Any], source: Any, /, **options: Any) -> Any:
    """Call a ``from_pretrained`` or ``from_config``; ``ValueError`` for a model that needs code of its own files."""
    try:
        return make(source, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError("it needs code of its own (auto_map), which is never run: take another model") from error


def read(path: str, key: str, what: str, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Call ``function``; raise a ConfigError for whatever it raises: transformers takes files' values unchecked."""
    try:
        return function(*args, **options)
    except Exception as error:  # files of wrong types raise anything
        text = str(error) if isinstance(error, OSError | ValueError | RuntimeError | ImportError) else describe(error)
        if isinstance(error, TypeError | AttributeError):  # in Python's words
            text = "a value in its files is of another type, or name, than transformers takes"
        if isinstance(error, KeyError) and error.args == (options.get("attn_implementation"),):
            text = f"its code knows no attention {error}"
        lines = text.partition("Model type should be one of")[0].strip().splitlines()  # all of transformers' follow
        reason = _CLASS.sub(r"\1", " ".join(line.strip() for line in lines[:2]).rstrip("."))
        if found := _FIELD.search(reason):
            reason = f"config.json has {found[1]} {found[2]}, which is of no type that {found[1]} takes"
        if reason.startswith("FlashAttention"):
            raise ConfigError(f"{key}.attn_implementation: {reason}") from error
        place = "the folder" if Path(path).is_dir() else "no folder has that name, and as a Hugging Face Hub name it"
        raise ConfigError(f"{key}.path {path!r}: {place} gives no {what}: {reason}. Correct it.") from error


def read_config(path: str, key: str) -> Any:
    """Read ``config.json`` as transformers' configuration of that model."""
    check_folder(path, key)
    config = read(path, key, "configuration", pretrained, AutoConfig.from_pretrained, path)
    if not hasattr(config.get_text_config(), "__dict__"):
        raise ConfigError(f"{key}.path {path!r}: config.json has a text_config beside a model of text: remove it.")
    for name, value in vars(config.get_text_config()).items():
        most = MOST_LAYERS if name == "num_hidden_layers" else value
        if _COUNTS.fullmatch(name) and isinstance(value, int) and not 1 <= value <= most:
            raise ConfigError(f"{key}.path {path!r}: config.json has {name} {value}, which makes no model: correct it.")
    return config


def read_generation_config(path: str) -> GenerationConfig | None:
    """Read ``generation_config.json``, which is optional."""
    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:
        if not isinstance(error, OSError) or (Path(path) / "generation_config.json").exists():
            problem = "it is no JSON object" if isinstance(error, TypeError | AttributeError) else describe(error)
            raise ConfigError(f"{path}/generation_config.json: correct or remove it: {problem}") from error
        return None
