"""A TorchTitan decoder without its output layer: the trunk of a critic."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from rlplug_trainer_titan.network import TitanNetwork


class TitanTrunk(TitanNetwork):
    """A network that ends with the hidden states which the output layer of a :class:`TitanNetwork` would read.

    Args:
        decoder: TorchTitan's model, on the meta device.
        adapter: Its state-dict adapter.
        template: The transformers model of the same folder.
    """

    def __init__(self, decoder: Any, adapter: Any, template: Any) -> None:
        super().__init__(decoder, adapter, template)
        decoder.lm_head, decoder.enable_weight_tying = None, False  # tied embeddings keep the weight

    def forward(  # type: ignore[override]  # hidden states, and no logits
        self, input_ids: Tensor, position_ids: Tensor, cu_seq_lens_q: Tensor, max_length_q: int, **unused: Any
    ) -> BaseModelOutput:
        """Return the hidden states [1, n, D] of a packed row [1, n], and then those of a filling."""
        hidden: Any = self.hidden_states(input_ids, position_ids, cu_seq_lens_q, max_length_q)
        return BaseModelOutput(last_hidden_state=hidden)
