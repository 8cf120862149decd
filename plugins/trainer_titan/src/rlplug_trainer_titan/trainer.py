"""``TorchTitan``: trains TorchTitan's models under rlplug's loop, FSDP2 and engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final, cast

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rlplug.errors import ConfigError
from rlplug.interfaces import (
    ActivationTraits,
    Effect,
    ModelConfig,
    ModelTrainer,
    RouterReplay,
    TrainerClaims,
    WeightsOfParameters,
)
from rlplug.models.hf_files import read_config
from rlplug.models.loading import empty_model, stored_weights
from rlplug.types import MeshSizes
from rlplug.weight_sync.hf_names import hf_weights
from rlplug_trainer_titan.checkpointing import Checkpointing, checkpoint_blocks
from rlplug_trainer_titan.compilation import compile_blocks
from rlplug_trainer_titan.decoders import build_decoder, check_config, sparse_layers
from rlplug_trainer_titan.float8 import Float8, check_float8
from rlplug_trainer_titan.library import check_version
from rlplug_trainer_titan.network import TitanNetwork
from rlplug_trainer_titan.trunk import TitanTrunk
from rlplug_trainer_titan.weights import copy_weight

EXPERT_PARALLELISM: Final = Version("2.13")
"""Oldest torch that shards the experts and the rest of a network over different ranks as TorchTitan does."""
SPMD_TYPES: Final = Version("2.14.0.dev0")
"""Oldest torch with which TorchTitan's back end ``spmd_types`` shards."""


class TorchTitan(ModelTrainer):
    """Train TorchTitan's Llama 3 and Qwen3, dense or a mixture of experts, from and to Hugging Face folders.

    The strategy's ``tensor`` axis splits blocks, embeddings and output layer by TorchTitan's tensor parallelism, and
    the tokens of a row between blocks by its sequence parallelism. The ``shard`` axis is FSDP2, as for other trainers.
    A critic's own trunk is a model of TorchTitan too.

    Args:
        spmd_backend: TorchTitan's back end of tensor parallelism: ``partial_dtensor``. Its own default, ``spmd_types``,
            needs torch 2.14 and is not supported yet.
        pipeline: Pipeline stages; not supported, so 1.
        context: Ranks of TorchTitan's context parallelism; not supported with packed sequences, so 1.
        expert: Ranks that share the experts of each layer (expert parallelism): each holds whole experts, and tokens
            travel to them and back (all-to-all). They are ranks of the ``shard`` and ``tensor`` axes; FSDP shards over
            the others what each holds.
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
        critic=True,
        router_replay=True,
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

    def check(self, config: ModelConfig, key: str, mesh: MeshSizes) -> None:
        self._check_options()
        check_version()
        check_float8(self.float8, self.compile, mesh.tensor)
        model = read_config(config.path, key)
        check_config(model, key, config.path, mesh, self.expert)
        if sparse_layers(model):
            self._check_mixture(f"{key}.path {config.path!r}")

    def _check_mixture(self, where: str) -> None:
        for option, only in {"compile": False, "activation_checkpoint": "none", "float8": "none"}.items():
            if (value := getattr(self, option)) != only:
                raise ConfigError(
                    f"model.trainer.init_args.{option} is {value}, and {where} is a mixture of experts: the two are "
                    f"not supported together yet. Set it to {str(only).lower()}."
                )

    def _check_options(self) -> None:
        unsupported = {
            "pipeline": (1, "pipeline parallelism is not supported, because each stage would need the whole loss"),
            "context": (1, "context parallelism is not supported, because it would split packed sequences"),
        }
        for option, (only, reason) in unsupported.items():
            if (value := getattr(self, option)) != only:
                raise ConfigError(
                    f"model.trainer.init_args.{option} is {value}: of TorchTitan, {reason}. Set it to {only}."
                )
        found = Version(version("torch"))
        if self.expert < 1:
            raise ConfigError(f"model.trainer.init_args.expert is {self.expert}: give the number of ranks, at least 1.")
        if self.expert > 1 and found < EXPERT_PARALLELISM:
            raise ConfigError(
                f"model.trainer.init_args.expert is {self.expert}, and TorchTitan's expert parallelism needs torch "
                f"{EXPERT_PARALLELISM} or newer; this is {found}. Set it to 1, or install a newer torch."
            )
        if self.spmd_backend == "partial_dtensor":
            return
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
        return self._empty(TitanNetwork, config, key)

    def empty_trunk(self, config: ModelConfig, key: str) -> nn.Module:
        return self._empty(TitanTrunk, config, key)

    def router_replay(self, network: nn.Module) -> RouterReplay:
        return RouterReplay(cast(TitanNetwork, network).routers)

    def _empty(self, network_class: type[TitanNetwork], config: ModelConfig, key: str) -> nn.Module:
        template: Any = empty_model(config, key)
        decoder, adapter = build_decoder(template.config, self.expert, self.float8, self.compile)
        checkpoint_blocks(decoder, self.activation_checkpoint)
        if self.compile:
            compile_blocks(decoder, self.compile_backend)
        network = network_class(decoder, adapter, template).train()
        _check_names(network, template, f"{key}.path {config.path!r}")
        return network

    def split(self, network: nn.Module, mesh: DeviceMesh) -> Mapping[nn.Module, DeviceMesh]:
        own = cast(TitanNetwork, network)
        if own.routers and any("forward" in vars(block) for block in own.blocks):
            raise ConfigError(
                "model.optimizations compiles or recomputes blocks, and the model is a mixture of experts: the two are "
                "not supported together with TorchTitan yet. Remove CompileBlocks, GradientCheckpointing and "
                "SelectiveCheckpointing."
            )
        return own.split(mesh, self.expert)

    def fsdp_units(self, network: nn.Module) -> list[nn.Module]:
        """Return the blocks and, unless they are tied, the input embeddings and the output layer, if there is one."""
        decoder = cast(TitanNetwork, network).decoder
        ends = [] if decoder.enable_weight_tying else [decoder.tok_embeddings, decoder.lm_head]
        return [*cast(TitanNetwork, network).blocks, *(end for end in ends if end is not None)]

    @torch.no_grad()
    def load_weights(self, network: nn.Module, config: ModelConfig, key: str) -> Effect:
        own = cast(TitanNetwork, network)
        own.init_buffers()
        parameters = dict(own.named_parameters())
        targets = {w.name: (parameters[name], w) for name, weights in own.hf_weights().items() for w in weights}
        shapes = {name: weight.shape for name, (_, weight) in targets.items()}
        device = next(iter(parameters.values())).device
        for name, source in stored_weights(config, key, shapes, device):
            copy_weight(*targets.pop(name), source)
        assert not targets, f"no value came for {sorted(targets)}"
        how = f"drawn with seed {config.seed}" if config.init == "random" else "read in shards"
        parts = [type(own.decoder).__name__, *own.features(), f"weights {how}"]
        return Effect(f"TorchTitan {version('torchtitan')}: {', '.join(parts)}")

    def hf_weights(self, network: nn.Module) -> WeightsOfParameters:
        return cast(TitanNetwork, network).hf_weights()

    def architecture(self, network: nn.Module) -> str:
        return cast(TitanNetwork, network).architecture


def _check_names(network: TitanNetwork, template: nn.Module, where: str) -> None:
    """Refuse a model whose weights are others in transformers: an engine or a checkpoint could not get them all."""
    own, known = (
        {(weight.name, weight.shape) for weights in of_parameters.values() for weight in weights}
        for of_parameters in (network.hf_weights(), hf_weights(template))
    )
    if network.get_output_embeddings() is None:  # a trunk
        known = {(name, shape) for name, shape in known if name != "lm_head.weight"}
    if own != known:
        name, shape = min(own ^ known)
        raise ConfigError(
            f"{where}: transformers and TorchTitan differ in {len(own ^ known)} weights of it, first {name} "
            f"{list(shape)}. Remove model.trainer to train it with transformers."
        )
