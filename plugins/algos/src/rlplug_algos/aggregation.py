"""Aggregation of a loss per token to one number, with denominators of the whole mini-batch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from rlplug.interfaces import Denominators
from rlplug.types import Batch

Aggregation: TypeAlias = Literal["token", "sequence", "constant"]


def aggregate(
    per_token: Tensor,
    batch: Batch,
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
        per_token: float [K].
        batch: The micro-batch.
        denominators: Global counts; 0 counts as 1.
        aggregation: The mean to take.
        max_new_tokens: Longest completion that the run allows, in tokens; used by ``constant``.
    """
    num_sequences = max(denominators.num_sequences, 1)
    if aggregation == "token":
        return per_token.sum() / max(denominators.num_tokens, 1)
    if aggregation == "sequence":
        return (per_token / batch.spread(batch.num_tokens)).sum() / num_sequences
    assert max_new_tokens is not None, "Algorithm.setup was not called"
    return per_token.sum() / (num_sequences * max_new_tokens)
