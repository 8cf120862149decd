"""Whether a run shares prefixes, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import ConfigError
from rlplug.models.attention import NAME as PACKED
from rlplug.models.hf_files import read_config

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.training.row_layout import RowLayout

TOLERANCE: Final = 0.02
"""Largest relative difference of FlexAttention in bfloat16 from attention in float32, in the 2-norm."""
OFF: Final = "set model.batch.share_prefixes: false"


def decide(config: RunConfig, on_gpu: bool) -> RowLayout | None:
    """Return the layout of a run, or ``None`` after a line that says why its completions have a prompt each.

    Raises:
        ConfigError: On this GPU, FlexAttention does not compute what it should.
    """
    if config.batch.group_size == 1:
        return None
    text_config = read_config(config.policy.path, "model.policy").get_text_config()
    if reason := why_not(config, text_config, on_gpu):
        rank_zero_info(f"completions of a group compute their prompt each: {reason}")
        return None
    from rlplug_optims.shared_prefixes.layout import PrefixLayout

    if on_gpu and torch.cuda.is_available():
        require_flex_attention(text_config)
    layout = PrefixLayout(on_gpu)
    rank_zero_info(f"completions of a group compute their prompt once, {layout.describe()}")
    return layout


def require_flex_attention(text_config: Any) -> None:
    """Compile FlexAttention for a model's heads, and compare it with attention by segments, gradients included.

    Raises:
        ConfigError: It fails, or differs.
    """
    from rlplug_optims.shared_prefixes.comparison import differences

    try:
        found = differences(text_config)
    except Exception as error:  # of a compiler, which says much of itself and little of the model
        what = f"{type(error).__name__}: {error}"[:400]
        raise ConfigError(f"FlexAttention does not compute attention of this model's heads ({what}): {OFF}.") from error
    for name, difference in found.items():
        if not difference < TOLERANCE:
            raise ConfigError(
                f"FlexAttention's {name} differs by {difference:.3g} from what torch computes for this model's heads: "
                f"{OFF}."
            )


def why_not(config: RunConfig, text_config: Any, on_gpu: bool) -> str | None:
    """Return why a run cannot share prefixes, or ``None``."""
    if not config.model_trainer.claims.shared_prefixes:
        return f"model.trainer {type(config.model_trainer).__name__} does not support sharing"
    models = [config.policy, config.reference, None if config.critic is None else config.critic.trunk]
    if any(model is not None and model.attn_implementation != PACKED for model in models):
        return f"it needs attn_implementation: {PACKED}"
    if config.router_replay:
        return "model.router_replay replays the experts that each completion had for it"
    if getattr(text_config, "kv_lora_rank", None) is not None:
        return "its values are of another size than its queries, which was not tried"
    names = {type(each).__name__ for each in config.optimizations}
    if "FlashAttention4" in names:
        return "FlashAttention4 computes attention of whole sequences alone"
    if not on_gpu and "CompileBlocks" in names:
        return "on a CPU, CompileBlocks would compile for each tree anew"
    return None
