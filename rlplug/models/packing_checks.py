"""Which models can run on packed rows, and with which attention: what would go wrong is refused before it is loaded."""

from __future__ import annotations

from typing import Any, Final

from rlplug.errors import ConfigError
from rlplug.models import attention

IMPLEMENTATIONS: Final = (attention.NAME, "flash_attention_2", "flash_attention_3")
"""Those that heed the borders of sequences in every model; others see them in some alone."""
KNOWN_LAYERS: Final = ("full_attention", "sliding_attention")
"""Of transformers' types of layers, those that keep inside the sequences of a packed row."""


def check_attention(model_class: Any, implementation: str, key: str) -> None:
    """Refuse attention that would see a packed row as one sequence.

    Args:
        model_class: Of transformers.
        implementation: Its ``attn_implementation``.
        key: Where the configuration names the model, for messages.

    Raises:
        ConfigError: The implementation is none of ``IMPLEMENTATIONS``, or the model takes no heed of it, or not in the
            way of transformers' interface.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"{key}.attn_implementation is {implementation!r}, which can let a sequence reach into the one that is "
            f"packed behind it: take one of {', '.join(IMPLEMENTATIONS)}."
        )
    if not model_class._supports_attention_backend:
        raise ConfigError(
            f"{key}.path: {model_class.__name__} does not mix tokens through transformers' attention interface, and a "
            "sequence would reach into the one that is packed behind it. Take another model."
        )


def check_layers(model: Any, key: str) -> None:
    """Refuse a model in which one sequence of a packed row would reach into the next.

    Args:
        model: Of transformers.
        key: Where the configuration names it, for messages.

    Raises:
        ConfigError: It has a recurrent state, or layers of a type that is not known to keep sequences apart.
    """
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - set(KNOWN_LAYERS)
    if types or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{key}.path: {type(model).__name__} has {', '.join(sorted(types)) or 'recurrent'} layers, in which a "
            "sequence would reach into the one that is packed behind it. Take a model of attention layers alone."
        )


def check_long_sequences(config: Any, implementation: str, key: str, longest: int, sequence_size: int) -> None:
    """Refuse what would silently go wrong with long sequences.

    Args:
        config: Of a text model of transformers.
        implementation: Its ``attn_implementation``.
        key: Where the configuration names the model, for messages.
        longest: Tokens of the longest possible sequence.
        sequence_size: Ranks that share a row.

    Raises:
        ConfigError: Ranks share rows and attention is not rlplug's own, which alone exchanges their parts; or
            sequences are longer than those for which LongRoPE (arXiv 2402.13753) has its short factors: transformers
            then takes the long ones for all that is packed beside them as well.
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
            f"{rope['original_max_position_embeddings']} this model turns to other rotary frequencies, for all "
            "sequences of a pass: lower sampling.max_new_tokens or data.max_prompt_tokens."
        )
