"""Aggregation of a loss per token to one number, with denominators of the whole mini-batch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from rlplug.interfaces import Denominators
from rlplug.ops import masked_sum

Aggregation: TypeAlias = Literal["token", "sequence", "constant"]


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    denominators: Denominators,
    aggregation: Aggregation,
    max_new_tokens: int | None = None,
) -> Tensor:
    """Return a micro-batch's share of the mini-batch's mean.

    - ``token``: sum / ``num_tokens``. Every token counts the same (DAPO, arXiv:2503.14476, equation 8).
    - ``sequence``: sum of each sequence's mean / ``num_sequences`` (GRPO, arXiv:2402.03300, equation 3).
    - ``constant``: sum / (``num_sequences`` x ``max_new_tokens``): like ``sequence``, without favouring short
      completions (Dr.GRPO, arXiv:2503.20783).

    ``num_sequences`` counts sequences with a trainable token. TRL divides by the number of all sequences, so there a
    masked completion makes the loss smaller.

    Args:
        per_token: float [B, T].
        mask: bool [B, T].
        denominators: Global counts; 0 counts as 1.
        aggregation: The mean to take.
        max_new_tokens: Longest completion that the run allows, in tokens; used by ``constant``.
    """
    num_sequences = max(denominators.num_sequences, 1)
    if aggregation == "token":
        return masked_sum(per_token, mask) / max(denominators.num_tokens, 1)
    if aggregation == "sequence":
        return masked_sum(per_token / mask.sum(dim=1, keepdim=True).clamp(min=1), mask) / num_sequences
    assert max_new_tokens is not None, "Algorithm.setup was not called"
    return masked_sum(per_token, mask) / (num_sequences * max_new_tokens)
