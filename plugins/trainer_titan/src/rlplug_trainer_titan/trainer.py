"""``TorchTitan``: trains TorchTitan's models under rlplug's loop, FSDP2 and engines."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final, cast

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlplug.errors import ConfigError
from rlplug.interfaces import ActivationTraits, Effect, ModelConfig, ModelTrainer, TrainerClaims, WeightsOfParameters
from rlplug.models.hf_files import read_config
from rlplug.models.loading import copy_part, empty_model, whole_weights
from rlplug_trainer_titan.checkpointing import Checkpointing, checkpoint_blocks
from rlplug_trainer_titan.compilation import compile_blocks
from rlplug_trainer_titan.decoders import build_decoder, check_config
from rlplug_trainer_titan.float8 import Float8, check_float8
from rlplug_trainer_titan.library import check_version
from rlplug_trainer_titan.network import TitanNetwork

SPMD_TYPES: Final = Version("2.14.0.dev0")
"""Oldest torch with which TorchTitan's back end ``spmd_types`` shards."""


class TorchTitan(ModelTrainer):
    """Train TorchTitan's Llama 3 and Qwen3 (dense, tied or not), from and to Hugging Face folders.

    The strategy's ``tensor`` axis splits blocks, embeddings and output layer by TorchTitan's tensor parallelism, and
    the tokens of a row between blocks by its sequence parallelism. The ``shard`` axis is FSDP2, as for other trainers.

    Args:
        spmd_backend: TorchTitan's back end of tensor parallelism: ``partial_dtensor``. Its own default, ``spmd_types``,
            needs torch 2.14 and is not supported yet.
        pipeline: Pipeline stages; not supported, so 1.
        context: Ranks of TorchTitan's context parallelism; not supported with packed rows, so 1.
        expert: Ranks of expert parallelism; not supported yet, so 1.
        compile: Compile every block with ``torch.compile``, whole.
        compile_backend: Backend of ``torch.compile``; ``aot_eager`` compiles nothing, and shows whether a fault is the
            compiler's or the model's.
        activation_checkpoint: What blocks recompute in the backward pass: ``none``; ``selective``, all but attention
            and every second matrix product; or ``full``, the whole block.
        float8: Multiply inputs, weights and gradients of the linear layers of blocks in float8 (torchao):
            ``rowwise``, with a scale for each row, or ``rowwise_with_gw_hp``, which keeps the products of weight
            gradients in the dtype of the pass. Needs an NVIDIA GPU of Ada, Hopper or newer, and saves time with
            ``compile`` alone. ``emulated`` rounds on any device, to see the effect.
    """

    claims = TrainerClaims(
        axes=frozenset({"replicate", "tensor"}),
        attention=frozenset({"packed"}),
        optimizations=frozenset(
            {
                *("BackwardPrefetch", "CompileBlocks", "EntropyCheckpointing", "EntropyChunking", "ForwardPrefetch"),
                *("FusedLogprobs", "GradientCheckpointing", "SelectiveCheckpointing"),
            }
        ),
    )

    def __init__(
        self,
        spmd_backend: str = "partial_dtensor",
        pipeline: int = 1,
        context: int = 1,
        expert: int = 1,
        compile: bool = False,
        compile_backend: str = "inductor",
        activation_checkpoint: Checkpointing = "none",
        float8: Float8 = "none",
    ) -> None:
        self.spmd_backend = spmd_backend
        self.pipeline = pipeline
        self.context = context
        self.expert = expert
        self.compile = compile
        self.compile_backend = compile_backend
        self.activation_checkpoint = activation_checkpoint
        self.float8 = float8
        self.claims = replace(type(self).claims, conflicts=self._conflicts())

    def _conflicts(self) -> dict[str, str]:
        """Return the optimizations that the options exclude."""
        key, conflicts = "model.trainer.init_args", {}
        if self.compile:
            conflicts["CompileBlocks"] = f"{key}.compile compiles the same blocks"
        if self.activation_checkpoint != "none":
            same = f"{key}.activation_checkpoint decides what the same blocks recompute"
            conflicts |= dict.fromkeys(("GradientCheckpointing", "SelectiveCheckpointing"), same)
        return conflicts

    def check(self, config: ModelConfig, key: str, tensor_size: int) -> None:
        self._check_options()
        check_version()
        check_float8(self.float8, self.compile, tensor_size)
        check_config(read_config(config.path, key), key, config.path, tensor_size)

    def _check_options(self) -> None:
        unsupported = {
            "pipeline": (1, "pipeline parallelism is not supported, because each stage would need the whole loss"),
            "context": (1, "context parallelism is not supported, because it would split packed sequences"),
            "expert": (1, "expert parallelism is not supported yet"),
        }
        for option, (only, reason) in unsupported.items():
            if (value := getattr(self, option)) != only:
                raise ConfigError(
                    f"model.trainer.init_args.{option} is {value}: of TorchTitan, {reason}. Set it to {only}."
                )
        if self.spmd_backend == "partial_dtensor":
            return
        found = Version(version("torch"))
        reason = "which is not supported yet"
        if self.spmd_backend == "spmd_types" and found < SPMD_TYPES:
            reason = f"which needs torch 2.14 or newer, and this is {found}"
        raise ConfigError(
            f"model.trainer.init_args.spmd_backend is {self.spmd_backend!r}, {reason}. Set it to partial_dtensor."
        )

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        recompute: Any = {"none": "nothing", "selective": "all_but_half_of_products", "full": "all"}
        return replace(
            traits,
            fused_norms=True,
            fused_pointwise=self.compile,
            recompute=recompute[self.activation_checkpoint],
            sequence_parallel=True,
        )

    def empty_network(self, config: ModelConfig, key: str) -> nn.Module:
        template: Any = empty_model(config, key)
        decoder, adapter = build_decoder(template.config, self.float8, self.compile)
        checkpoint_blocks(decoder, self.activation_checkpoint)
        if self.compile:
            compile_blocks(decoder, self.compile_backend)
        return TitanNetwork(decoder, adapter, template).train()

    def split(self, network: nn.Module, mesh: DeviceMesh) -> None:
        cast(TitanNetwork, network).split(mesh)

    def fsdp_units(self, network: nn.Module) -> list[nn.Module]:
        """Return the blocks and, unless they are tied, the input embeddings and the output layer."""
        own = cast(TitanNetwork, network)
        ends = [] if own.decoder.enable_weight_tying else [own.decoder.tok_embeddings, own.decoder.lm_head]
        return [*own.blocks, *ends]

    @torch.no_grad()
    def load_weights(self, network: nn.Module, config: ModelConfig, key: str) -> Effect:
        own = cast(TitanNetwork, network)
        own.init_buffers()
        parameters, weights = dict(own.named_parameters()), own.hf_weights()
        targets = {weight.name: parameters[name] for name, (weight,) in weights.items()}
        shapes = {weight.name: weight.shape for (weight,) in weights.values()}
        device = next(iter(parameters.values())).device
        for hf_name, whole in whole_weights(config, key, shapes, device):
            copy_part(targets.pop(hf_name), own.from_hf(hf_name, whole))
        assert not targets, f"no value came for {sorted(targets)}"
        how = f"drawn with seed {config.seed}" if config.init == "random" else "read one after another"
        parts = [type(own.decoder).__name__, *own.features(), f"weights {how}"]
        return Effect(f"TorchTitan {version('torchtitan')}: {', '.join(parts)}")

    def hf_weights(self, network: nn.Module) -> WeightsOfParameters:
        return cast(TitanNetwork, network).hf_weights()

    def architecture(self, network: nn.Module) -> str:
        return cast(TitanNetwork, network).architecture
