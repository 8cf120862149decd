"""A TorchTitan decoder as a network of rlplug: packed rows in, logits of some positions out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

from rlplug.distributed.mesh import with_replicas
from rlplug.interfaces import WeightsOfParameters
from rlplug_trainer_titan.attention import PackedSequences
from rlplug_trainer_titan.checkpointing import WRAPPER, num_checkpointed
from rlplug_trainer_titan.compilation import num_compiled
from rlplug_trainer_titan.float8 import MULTIPLE, num_in_float8
from rlplug_trainer_titan.library import titan
from rlplug_trainer_titan.weights import checkpoint_weights

PREFIX = "decoder."
"""Prefix of the names of TorchTitan's parameters in the network."""


class TitanNetwork(nn.Module):
    """A decoder of TorchTitan, with what the core asks of a network (see ``rlplug.interfaces.ModelTrainer``).

    Args:
        decoder: TorchTitan's model, on the meta device.
        adapter: Its state-dict adapter, which names and reorders one weight at a time.
        template: The transformers model of the same folder, of which configurations and class name are kept.
    """

    def __init__(self, decoder: Any, adapter: Any, template: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.adapter = adapter
        self.config = template.config
        self.generation_config = template.generation_config
        self.architecture = type(template).__name__
        self._multiple = MULTIPLE if num_in_float8(decoder.modules()) else 1
        self.decoder.tok_embeddings.padding_idx = template.get_input_embeddings().padding_idx
        decoder._skip_lm_head = True  # this module calls the output layer, where tokens train

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        layer: nn.Module = self.decoder.lm_head
        return layer

    @property
    def blocks(self) -> list[Any]:
        """The transformer blocks, each in the wrapper of its checkpointing if it has one."""
        return list(self.decoder.layers.values())

    def features(self) -> list[str]:
        """Return what was done to the blocks, as their modules show it."""
        linears = [module for block in self.blocks for module in block.modules() if isinstance(module, nn.Linear)]
        counts = {
            f"float8 in {{}} of {len(linears)} linear layers of the blocks": num_in_float8(linears),
            "activation checkpointing of {} blocks": num_checkpointed(self.blocks),
            "torch.compile on {} blocks": num_compiled(self.blocks),
        }
        return [text.format(count) for text, count in counts.items() if count]

    @property
    def routers(self) -> list[Any]:
        """The routers of the layers that are mixtures of experts, in their order."""
        return [mixture.router for mixture in self._mixtures]

    @property
    def _mixtures(self) -> list[Any]:
        return [block.moe for block in self.blocks if getattr(block, "moe_enabled", False)]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        logits_to_keep: Tensor,
        **unused: Any,
    ) -> CausalLMOutput:
        """Return the logits [1, K, V] at positions ``logits_to_keep`` of a packed row [1, n]."""
        hidden = self.hidden_states(input_ids, position_ids, cu_seq_lens_q, max_length_q)
        logits = self.decoder.lm_head(hidden[:, logits_to_keep])
        return CausalLMOutput(logits=logits.full_tensor() if isinstance(logits, DTensor) else logits)

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor, cu_seq_lens_q: Tensor, max_length_q: int
    ) -> Tensor:
        """Return the hidden states [1, n, D] of a packed row [1, n] after the last norm, and then those of a filling.

        The row is filled up to a multiple of what float8 needs, and of the ranks of tensor parallelism, which share the
        row between blocks (sequence parallelism). The filling belongs to the last sequence: attention is causal.
        """
        filling = -input_ids.shape[1] % self._multiple
        if filling:
            input_ids, position_ids = (nn.functional.pad(t, (0, filling)) for t in (input_ids, position_ids))
            cu_seq_lens_q = torch.cat([cu_seq_lens_q[:-1], cu_seq_lens_q[-1:] + filling])
        sequences = PackedSequences(cu_seq_lens_q, max_length_q + filling)
        hidden: Tensor = self.decoder(input_ids, positions=position_ids, attention_masks=sequences)
        return hidden.to_local() if isinstance(hidden, DTensor) else hidden  # its last norm gathers the row again

    def split(self, mesh: DeviceMesh, expert: int) -> dict[nn.Module, DeviceMesh]:
        """Split the decoder over the tensor axis of ``mesh``, and its experts over ``expert`` ranks.

        Returns:
            The experts of each layer that are split over ranks, with the mesh over which FSDP shards them.
        """
        size = mesh["tensor"].size()
        if size == expert == 1:
            return {}
        axes = {"tp": mesh["tensor"]._flatten("tp")}  # named as in TorchTitan's configurations
        fsdp_meshes: dict[nn.Module, DeviceMesh] = {}
        if expert > 1:
            ranks = mesh["shard", "tensor"]._flatten("experts")
            of_experts = ranks._unflatten(0, (ranks.size() // expert, expert), ("weights", "ep"))
            axes["ep"], weights = of_experts["ep"], with_replicas(mesh, of_experts["weights"])
            fsdp_meshes = {mixture.routed_experts.inner_experts: weights for mixture in self._mixtures}
        dimensions = titan("distributed").ParallelDims(
            dp_replicate=1,
            dp_shard=mesh["shard"].size(),
            cp=1,
            tp=size,
            pp=1,
            ep=expert,
            world_size=mesh["shard"].size() * size,
            spmd_backend="partial_dtensor",
            _single_axis_meshes=axes,  # or it would build meshes of its own, over all ranks
        )
        self.decoder.parallelize(dimensions)
        if self.decoder.enable_weight_tying:  # each end was split on its own
            self.decoder.tok_embeddings.weight = self.decoder.lm_head.weight
        if size > 1:
            self._split_padding(axes["tp"])
        self._multiple = math.lcm(self._multiple, size)
        return fsdp_meshes

    def _split_padding(self, axis: DeviceMesh) -> None:
        """Let the padding token's embedding get no gradient, as in transformers, on the rank that holds it."""
        embeddings = self.decoder.tok_embeddings
        if embeddings.padding_idx is None:
            return
        num_rows = -(-embeddings.num_embeddings // axis.size())
        rank, row = divmod(embeddings.padding_idx, num_rows)
        embeddings.padding_idx = row if rank == axis.get_local_rank() else None

    def init_buffers(self) -> None:
        """Compute the rotary table once; all blocks share it, where TorchTitan would keep one for each."""
        first, *others = (block.attention.rope for block in self.blocks)
        first.init_states()
        for rope in others:
            rope.cache = first.cache
        for mixture in self._mixtures:
            mixture.tokens_per_expert_E.zero_()  # a count that nothing here uses

    def hf_weights(self) -> WeightsOfParameters:
        """Return the weights that each parameter becomes in a Hugging Face checkpoint."""
        return {
            name: checkpoint_weights(self.adapter, name.removeprefix(PREFIX).replace(WRAPPER, ""), parameter.shape)
            for name, parameter in self.named_parameters()
        }
