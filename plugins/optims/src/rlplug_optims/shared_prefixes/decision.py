"""Whether a run shares prefixes, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.utilities import rank_zero_info

from rlplug.models.attention import NAME as PACKED

if TYPE_CHECKING:
    from rlplug.config import RunConfig
    from rlplug.interfaces.row_layout import RowLayout
    from rlplug.types import MeshSizes


def decide(config: RunConfig, mesh: MeshSizes, on_gpu: bool) -> RowLayout | None:
    """Return the layout of a run, or ``None`` after a line that says why its completions have a prompt each."""
    if config.batch.group_size == 1:
        return None
    if reason := why_not(config, mesh, on_gpu):
        rank_zero_info(f"completions of a group compute their prompt each: {reason}")
        return None
    from rlplug_optims.shared_prefixes.layout import PrefixLayout

    return PrefixLayout(on_gpu)


def why_not(config: RunConfig, mesh: MeshSizes, on_gpu: bool) -> str | None:
    """Return why a run cannot share prefixes, or ``None``."""
    if not config.model_trainer.claims.shared_prefixes:
        return f"model.trainer {type(config.model_trainer).__name__} does not support sharing"
    models = [config.policy, config.reference, None if config.critic is None else config.critic.trunk]
    if any(model is not None and model.attn_implementation != PACKED for model in models):
        return f"it needs attn_implementation: {PACKED}"
    if config.router_replay:
        return "model.router_replay replays the experts that each completion had for it"
    names = {type(each).__name__ for each in config.optimizations}
    if "FlashAttention4" in names:
        return "FlashAttention4 computes attention of whole sequences alone"
    if not on_gpu and "CompileBlocks" in names:
        return "on a CPU, CompileBlocks would compile for each tree anew"
    return None
