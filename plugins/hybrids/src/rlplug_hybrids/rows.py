"""Hooks that give a whole model the sequences of a packed row as a batch of padded rows, with its own attention.

Shape legend:
    N  tokens of all sequences
    S  sequences in the packed row
    T  tokens of the longest sequence, and of what padding a check adds
    K  tokens that predict
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rlplug.errors import ConfigError


def pad_rows(network: Any, ahead: int = 0) -> None:
    """Make a network compute a packed row as a batch with one row for each sequence, padded at the end.

    Its output layer gets the packed row's hidden states again, of the tokens that predict alone. Padding is the tokens
    that follow in the packed row. A causal model computes none of a sequence's tokens from them; in another the
    sequences leak into each other, which the checks at the start see.

    Args:
        network: A model of transformers on the meta device; a row is as :mod:`rlplug_hybrids.borders` says.
        ahead: Tokens by which each row is longer than the longest sequence.
    """
    if network._can_set_attn_implementation():
        network.set_attn_implementation("sdpa" if network._supports_sdpa else "eager")
    rows = _Rows(network, ahead)
    network.register_forward_pre_hook(rows.pad, with_kwargs=True)
    network.get_output_embeddings().register_forward_pre_hook(rows.pack_hidden)
    trunk = network.base_model
    if trunk is not network:  # alone it is a critic's
        rows = _Rows(network, ahead)
        trunk.register_forward_pre_hook(rows.pad, with_kwargs=True)
        trunk.register_forward_hook(rows.pack_output)


class _Rows:
    """Hooks around what computes padded rows, and the borders of the row that it is computing."""

    def __init__(self, network: nn.Module, ahead: int) -> None:
        self.name, self.ahead = type(network).__name__, ahead
        self.packing: Tensor | None = None
        """int64 [N]: place of each token in the padded batch"""
        self.kept: Any = slice(None)
        """int64 [K]: tokens whose logits were asked for"""

    def pad(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        borders, ids = kwargs.get("cu_seq_lens_q"), kwargs.get("input_ids")
        if borders is None or ids is None:
            return None
        borders, tokens = borders.to(torch.int64), torch.arange(ids.shape[1], device=ids.device)
        sequence = torch.searchsorted(borders, tokens, right=True) - 1
        steps = torch.arange(kwargs["max_length_q"] + self.ahead, device=ids.device)
        padding = (borders[:-1, None] + steps) % len(tokens)
        self.packing = sequence * len(steps) + tokens - borders[sequence]
        self.kept = kwargs.get("logits_to_keep", slice(None))
        padded = {"input_ids": ids[0, padding], "use_cache": False}  # RoBERTa's positions do not begin at 0
        known = inspect.signature(module.forward).parameters
        return args, {name: value for name, value in padded.items() if name in known}

    def pack_hidden(self, output_layer: nn.Module, args: Any) -> Any:
        if self.packing is None:
            return args
        if args[0].dim() != 3:
            what = f"its {type(output_layer).__name__} layer of logits gets states of {args[0].dim()} dimensions, not 3"
            raise ConfigError(f"{self.name} predicts several tokens from each place ({what}). Use another model.")
        return self._packed(args[0])[:, self.kept], *args[1:]

    def pack_output(self, trunk: nn.Module, args: Any, output: Any) -> Any:
        if self.packing is not None:
            output.last_hidden_state = self._packed(output.last_hidden_state)
        return output

    def _packed(self, batch: Tensor) -> Tensor:
        packing, self.packing = self.packing, None
        return batch.flatten(0, 1)[packing][None]
