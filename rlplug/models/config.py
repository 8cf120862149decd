"""Tokenizer of a model, and the policy's properties that need no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlplug.errors import ConfigError
from rlplug.interfaces.rollout import PolicySpec
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.hf_files import pretrained, read, read_config, read_generation_config

MakeTokenizer: TypeAlias = Callable[..., PreTrainedTokenizerBase]


def auto_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or Hugging Face Hub name with transformers' ``AutoTokenizer``.

    Raises:
        ValueError: There is no file of a tokenizer, or one of a package that is not installed.
    """
    try:
        tokenizer: Any = pretrained(AutoTokenizer.from_pretrained, path)
    except ValueError as error:
        if "backend tokenizer" not in str(error):
            raise
        raise ValueError(  # transformers' own goes on for five lines
            "there is no tokenizer.json, and no other file that can be read, for which sentencepiece or tiktoken may "
            "have to be installed. Copy the tokenizer's files of the model into it."
        ) from error
    return tokenizer  # type: ignore[no-any-return]


def load_tokenizer(
    config: ModelConfig, key: str = "model.policy", make: MakeTokenizer = auto_tokenizer
) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Without a padding token it pads with the end token, which masks always hide.

    Args:
        config: Configuration of the model, at ``key``.
        make: Makes the tokenizer, called with ``path``; a run passes the hook ``rlplug_make_tokenizer``.

    Raises:
        ConfigError: There is no such model, or it has no tokenizer.
    """
    _require_model_folder(config.path, key)
    read_config(config.path, key)  # first: transformers reads it for the tokenizer too, whose fault it would seem
    tokenizer: PreTrainedTokenizerBase = read(config.path, key, "tokenizer", make, path=config.path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not isinstance(length := tokenizer.model_max_length, int | float):
        raise ConfigError(f"{key}.path {config.path!r} has the model_max_length {length!r}: give its files a number.")
    return tokenizer


def _require_model_folder(path: str, key: str) -> None:
    """Refuse a folder without ``config.json``, such as one that holds folders of models, or with links to nothing."""
    folder = Path(path)
    if odd := [e.name for e in folder.glob("*") if not (e.is_file() or (e.is_dir() and e.suffix != ".json"))]:
        raise ConfigError(f"{key}.path {path!r}: {odd[0]} is no file, or a link to none: copy the model's files again.")
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    inside = [str(file.parent) for file in sorted(folder.glob("*/config.json"))]
    near = f" Did you mean {inside[0]!r}?" if inside else ""
    fix = f"{near} Give a folder with it and the tokenizer's files, or a name on the Hugging Face Hub."
    raise ConfigError(f"{key}.path {path!r} is no model folder: it has no config.json.{fix}")


def require_same_tokens(
    config: ModelConfig, key: str, tokenizer: PreTrainedTokenizerBase, make: MakeTokenizer = auto_tokenizer
) -> None:
    """Raise ``ConfigError`` unless a model has the vocabulary of the policy's ``tokenizer``."""
    if config.chat_template_kwargs:
        raise ConfigError(f"{key}.chat_template_kwargs has no effect: set model.policy.chat_template_kwargs.")
    if load_tokenizer(config, key, make).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{key}.path {config.path!r} has another tokenizer than model.policy.path, so the policy's token ids would "
            "mean other text: use a model of the same family."
        )


def load_spec(config: ModelConfig, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> PolicySpec:
    """Return the policy's properties that engine and data need, read without its weights; ``stop`` as in the result.

    Raises:
        ConfigError: The model does not embed an id of the tokenizer's text, or neither names an end token.
    """
    model_config = read_config(config.path, "model.policy")
    text_config = model_config.get_text_config()
    unused = {each for each in tokenizer.get_vocab().values() if each >= text_config.vocab_size}
    never = {each for each, token in tokenizer.added_tokens_decoder.items() if token.special}
    if unused - never | unused & {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}:
        raise ConfigError(
            f"model.policy.path {config.path!r}: the tokenizer has ids up to {max(unused)}, and the model embeds only "
            f"{text_config.vocab_size}. They belong to different models: use the tokenizer files of this one."
        )
    if unused:  # as of gemma-3-1b-it
        rank_zero_warn(
            f"The policy has no embedding of {len(unused)} special tokens of its tokenizer: no prompt may have one."
        )
    named: list[Any] = [tokenizer.eos_token_id]
    for owner in (text_config, read_generation_config(config.path)):
        end = getattr(owner, "eos_token_id", None)
        named += end if isinstance(end, list) else [end]
    ends = [end for end in named if end is not None]
    if odd := [end for end in ends if not isinstance(end, int)]:
        raise ConfigError(f"model.policy.path {config.path!r} has the end token {odd[0]!r}: give its files a number.")
    if not ends:
        raise ConfigError(
            f"model.policy.path {config.path!r}: neither tokenizer nor configuration names an end token, so no "
            "completion could stop. Set eos_token in tokenizer_config.json."
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends)
    return PolicySpec(
        path=config.path,
        dtype=config.torch_dtype,
        eos_token_ids=tuple(sorted(set(ends))),
        pad_token_id=int(pad),
        max_context=int(getattr(text_config, "max_position_embeddings", 1 << 20)),
        vocab_size=int(text_config.vocab_size),
        stop=stop,
    )
