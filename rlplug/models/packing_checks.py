"""Checks that a model keeps packed sequences apart, made before its weights are loaded."""

from __future__ import annotations

from typing import Any, Final

from rlplug.errors import ConfigError
from rlplug.models import attention

IMPLEMENTATIONS: Final = (attention.NAME, "flash_attention_2", "flash_attention_3")
"""Attention implementations that respect sequence boundaries in every model; others do in some models only."""
KNOWN_LAYERS: Final = ("full_attention", "sliding_attention")
"""Layer types of transformers that keep the sequences of a packed row apart."""


def check_attention(model_class: Any, implementation: str, key: str) -> None:
    """Raise an error for attention that would treat a packed row as one sequence.

    Args:
        model_class: Model class of transformers.
        implementation: Its ``attn_implementation``.
        key: Key of the model in the run's configuration, for messages.

    Raises:
        ConfigError: The implementation is not in ``IMPLEMENTATIONS``, or the model does not support transformers'
            AttentionInterface.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"{key}.attn_implementation is {implementation!r}, with which packed sequences can attend to each other: "
            f"give one of {', '.join(IMPLEMENTATIONS)}."
        )
    if not model_class._supports_attention_backend:
        raise ConfigError(
            f"{key}.path: {model_class.__name__} does not support transformers' AttentionInterface, so packed "
            "sequences would attend to each other. Use a model that does."
        )


def check_layers(model: Any, key: str) -> None:
    """Raise an error for a model whose layers would leak one packed sequence into the next.

    Args:
        model: A model of transformers.
        key: Key of the model in the run's configuration, for messages.

    Raises:
        ConfigError: The model has a recurrent state, or layers of a type that is not known to keep sequences apart.
    """
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - set(KNOWN_LAYERS)
    if types or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{key}.path: {type(model).__name__} has {', '.join(sorted(types)) or 'recurrent'} layers, which "
            "would leak each packed sequence into the next. Use a model with attention layers only."
        )


def check_long_sequences(config: Any, implementation: str, key: str, longest: int, sequence_size: int) -> None:
    """Raise an error for settings that would silently give wrong results with long sequences.

    Args:
        config: Configuration of a text model of transformers.
        implementation: Its ``attn_implementation``.
        key: Key of the model in the run's configuration, for messages.
        longest: Tokens of the longest possible sequence.
        sequence_size: Number of ranks that share a row.

    Raises:
        ConfigError: Ranks share rows and attention is not rlplug's own, the only one that exchanges their parts; or
            sequences can be too long for the short factors of LongRoPE (arXiv 2402.13753), and transformers would then
            use the long ones for all sequences that are packed with such a one.
    """
    if sequence_size > 1 and implementation != attention.NAME:
        raise ConfigError(
            f"trainer.strategy.init_args.sequence is {sequence_size} and {key}.attn_implementation {implementation!r}, "
            f"which sees only one rank's part of a row: set it to {attention.NAME}."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and longest > rope["original_max_position_embeddings"]:
        raise ConfigError(
            f"{key}: one sequence can have {longest} tokens (longest prompt and sampling.max_new_tokens), and past "
            f"{rope['original_max_position_embeddings']} this model uses other rotary frequencies, for all "
            "sequences of a pass: lower sampling.max_new_tokens or data.max_prompt_tokens."
        )
