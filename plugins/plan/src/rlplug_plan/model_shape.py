"""Sizes of a model that determine its memory, from its configuration and an empty copy of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rlplug.distributed.fsdp_units import pretrained_part, transformer_blocks
from rlplug.models.shape import Widths, widths_of
from rlplug_plan.layer_kinds import keeps_keys, kinds_of, mixing_elements


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model like Llama: gated MLPs or experts, two norms per block. For other models they are estimates."""

    parameters: int
    """Number of all parameters."""
    block_parameters: int
    """Parameters of the largest block."""
    end_parameters: int
    """Parameters of the larger of input embeddings and output layer; of both where they are tied."""
    num_blocks: int
    """Number of transformer blocks."""
    hidden: int
    """Hidden size D."""
    widths: Widths
    vocab: int
    """Vocabulary size V."""
    has_qk_norms: bool
    """Whether queries and keys are normalised, as in Qwen3."""
    kv_blocks: int
    """Blocks whose keys and values an engine keeps."""
    mixing: int
    """Elements of a token that a block keeps for attention, or for its state, on average."""
    token_parts: int = 1
    """Ranks of the tensor axis that split the tokens between blocks (sequence parallelism)."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelShape:
        """Return the shape of a transformers model, or of a critic around one; the meta device is enough."""
        inner: Any = pretrained_part(model)
        config = inner.config.get_text_config()
        blocks, widths = transformer_blocks(model), widths_of(config)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        return cls(
            parameters=_count(model.parameters()),
            block_parameters=max(_count(block.parameters()) for block in blocks),
            end_parameters=max((p.numel() for p in model.parameters() if id(p) not in inside), default=0),
            num_blocks=len(blocks),
            hidden=config.hidden_size,
            widths=widths,
            vocab=config.vocab_size,
            has_qk_norms=any(name.rpartition(".")[2] == "q_norm" for name, _ in blocks[0].named_modules()),
            kv_blocks=sum(map(keeps_keys, kinds_of(config))),
            mixing=mixing_elements(config, widths),
        )

    def split(self, tensor_size: int, sequence_parallel: bool = False) -> ModelShape:
        """Return the shape on one rank of the tensor axis: about its part of each block, and whole embeddings.

        With ``sequence_parallel`` embeddings, output layer and the tokens between blocks are split too.
        """
        if tensor_size == 1:
            return self
        parts = tensor_size if sequence_parallel else 1
        outside = (self.parameters - self.num_blocks * self.block_parameters) // parts
        block = self.block_parameters // tensor_size
        return replace(
            self,
            parameters=outside + self.num_blocks * block,
            block_parameters=block,
            end_parameters=self.end_parameters // parts,
            widths=Widths(*(width // tensor_size for width in self.widths)),
            mixing=self.mixing // tensor_size,
            token_parts=parts,
        )

    @property
    def kv_elements(self) -> int:
        """Elements of the keys and values of one token in all blocks that attend."""
        return 2 * self.kv_blocks * self.widths.key


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
