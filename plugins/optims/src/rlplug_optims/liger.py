"""Liger's Triton kernels in place of a model's own modules."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlplug.distributed.fsdp_units import pretrained_part
from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Effect, Optimization


class Liger(Optimization):
    """Replace rotary embeddings, RMS norms and gated MLPs with Liger's Triton kernels.

    Saves: passes over memory, and activations that the kernels do not keep.
    Costs: nothing but its needs: CUDA, and ``pip install rlplug-optims[liger]``.
    Proof: the modules whose forward method is Liger's, and the rotary function that is.

    Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989, through the package's own
    function for each model type. Its fused cross-entropy is not used: FusedLogprobs computes logprobs. The rotary
    embedding is a function of transformers' module and can only be replaced there: models of the same type that the
    process builds later, such as in a notebook or a comparison, use Liger's as well. Norms and MLPs are replaced in
    this model alone.

    Args:
        rope: Replace the rotary embeddings.
        rms_norm: Replace the norms.
        swiglu: Replace the gated MLPs, those with GELU (Liger's ``geglu``) included.
    """

    conflicts: ClassVar[Mapping[str, str]] = {
        "CompileBlocks": "both fuse the same operations, and torch.compile cannot see into Liger's kernels; together "
        "they are slower than either"
    }

    def __init__(self, rope: bool = True, rms_norm: bool = True, swiglu: bool = True) -> None:
        self.rope = rope
        self.rms_norm = rms_norm
        self.swiglu = swiglu
        self._model: nn.Module = nn.Identity()
        self._modeling: ModuleType | None = None

    def before_shard(self, model: nn.Module) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "Liger's kernels need CUDA, and this machine has no GPU: remove Liger from model.optimizations."
            )
        try:
            from liger_kernel.transformers import monkey_patch
        except ImportError as error:
            raise ConfigError(f"Liger is not installed ({error}): pip install rlplug-optims[liger]") from error
        trunk: Any = pretrained_part(model)
        model_type = trunk.config.model_type
        if model_type not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
            known = ", ".join(sorted(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN))
            raise ConfigError(
                f"Liger has no kernels for model type {model_type!r}, only for {known}: remove it from "
                "model.optimizations."
            )
        self._model = model
        self._modeling = sys.modules[type(trunk).__module__]
        plain = {name: value for name, value in vars(self._modeling).items() if isinstance(value, type)}
        monkey_patch._apply_liger_kernel_to_instance(
            model=trunk,
            rope=self.rope,
            rms_norm=self.rms_norm,
            swiglu=self.swiglu,
            geglu=self.swiglu,
            cross_entropy=False,
            fused_linear_cross_entropy=False,
        )
        vars(self._modeling).update(plain)  # Liger replaces the classes too, which would change later models

    def after_shard(self, model: nn.Module) -> None:
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        if any("tensor" in (mesh.mesh_dim_names or ()) for mesh in meshes):
            raise ConfigError(
                "model.optimizations has Liger, and trainer.strategy.init_args.tensor is above 1: Liger's kernels do "
                "not support tensor-parallel norms and matrices. Use CompileBlocks instead, or set tensor to 1."
            )

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        return replace(traits, fused_pointwise=self.rms_norm and self.swiglu)

    def effects(self) -> list[Effect]:
        effects = []
        if count := sum(_is_ligers(module.forward) for module in self._model.modules()):
            effects.append(Effect(f"Liger replaced {count} modules"))
        if self.rope and _is_ligers(getattr(self._modeling, "apply_rotary_pos_emb", None)):
            effects.append(Effect("Liger replaced the rotary embedding"))
        return effects


def _is_ligers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("liger_kernel")
