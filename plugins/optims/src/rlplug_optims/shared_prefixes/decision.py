"""Whether a run shares prefixes, and why not."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning.pytorch.utilities import rank_zero_info

from rlplug.errors import ConfigError
from rlplug.models.attention import NAME as PACKED
from rlplug.models.hf_files import read_config
from rlplug.models.loading import empty_model

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.training.row_layout import RowLayout

TOLERANCE: Final = 0.02
"""Largest relative difference of the kernels in bfloat16 from attention in float32, in the 2-norm."""
WIDEST: Final = 256
"""Width of a head up to which tiles of the kernels have room in a GPU's shared memory."""
OFF: Final = "set model.batch.share_prefixes: false"


def decide(config: RunConfig, on_gpu: bool) -> RowLayout | None:
    """Return the layout of a run, or ``None`` after a line that says why its completions have a prompt each.

    Raises:
        ConfigError: On this GPU, the kernels do not compute what they should.
    """
    if config.batch.group_size == 1:
        return None
    text_config = read_config(config.policy.path, "model.policy").get_text_config()
    if reason := why_not(config, text_config, on_gpu) or own_attention(config):
        rank_zero_info(f"completions of a group compute their prompt each: {reason}")
        return None
    from rlplug_optims.shared_prefixes.layout import PrefixLayout

    if on_gpu and torch.cuda.is_available():
        require_kernels(text_config)
    layout = PrefixLayout(on_gpu)
    rank_zero_info(f"completions of a group compute their prompt once, {layout.describe()}")
    return layout


def require_kernels(text_config: Any) -> None:
    """Compile the kernels for a model's heads, and compare them with attention by segments, gradients included.

    Raises:
        ConfigError: They fail, or differ.
    """
    from rlplug_optims.shared_prefixes.comparison import differences

    try:
        found = differences(text_config)
    except Exception as error:  # of a compiler, which says much of itself and little of the model
        what = f"{type(error).__name__}: {error}"[:400]
        raise ConfigError(f"the kernels of shared prefixes fail for this model's heads ({what}): {OFF}.") from error
    for name, difference in found.items():
        if not difference < TOLERANCE:
            raise ConfigError(
                f"for this model's heads, the {name} that the kernels of shared prefixes compute differs by "
                f"{difference:.3g} from torch's: {OFF}."
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
    if on_gpu and head_size(text_config) > WIDEST:
        return f"its heads are wider than {WIDEST}, which its kernels do not take"
    if on_gpu and torch.cuda.is_available() and find_spec("triton") is None:  # a plan is for another machine
        return "its kernels need Triton, which is not installed"
    if not on_gpu and "CompileBlocks" in names:
        return "on a CPU, CompileBlocks would compile for each tree anew"
    return None


def own_attention(config: RunConfig) -> str | None:
    """Return that a model computes its own attention, whatever its configuration asks for, as GPT-Neo, or ``None``."""
    trunk = None if config.critic is None else config.critic.trunk
    for key, model in (("policy", config.policy), ("reference", config.reference), ("critic.trunk", trunk)):
        if model is not None and empty_model(model, f"model.{key}").config._attn_implementation != PACKED:
            return f"model.{key} computes its own attention, which knows no shared prompts"
    return None


def head_size(text_config: Any) -> int:
    """Return the size of a model's heads, the largest where layers differ, as in Gemma 4."""
    sizes = (option(text_config, name) or 0 for name in ("head_dim", "global_head_dim"))
    return int(max(sizes) or text_config.hidden_size // option(text_config, "num_attention_heads"))


def option(text_config: Any, name: str) -> Any:
    """Return a size of a model, the largest where layers differ; ``None`` where its configuration has none."""
    layers = text_config.per_layer_config if getattr(text_config, "is_heterogeneous", False) else [text_config]
    values = [getattr(layer, name, None) for layer in layers]
    sizes = [size for value in values for size in (value if isinstance(value, list | tuple) else [value])]
    return max((size for size in sizes if size is not None), default=None)
