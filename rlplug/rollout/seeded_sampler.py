"""Sampling of tokens in which each sequence draws from a generator with its own seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlplug.ops import scaled_logits, token_logprobs, truncate_logits
from rlplug.types import SamplingParams


class SeededSampler:
    """Draws the next token of each sequence of a batch, by seeds that belong to the sequences.

    Sequence ``b`` at step ``i`` inverts the cumulative distribution at a number that is drawn in advance, ``i``-th of a
    generator with the sequence's seed. So a completion depends neither on the rest of its batch nor on the number of
    ranks, and the global generators stay as they are.

    Args:
        seeds: One for each sequence; any integers of 64 bits.
        sampling: Temperature, top-p and top-k; greedy for temperature 0.
        num_steps: Most tokens of a completion.
        device: Device of the logits.
    """

    def __init__(self, seeds: Sequence[int], sampling: SamplingParams, num_steps: int, device: torch.device) -> None:
        uniforms = [torch.rand(num_steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self._uniforms = torch.stack(uniforms).to(device)
        self._sampling = sampling
        self._step = 0

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens, int64 [B], and their logprobs under the sampled distribution, float32 [B].

        For greedy, the logprobs are those of the untempered distribution. Each call is one step.

        Args:
            logits: [B, V], any float dtype, in the order of the seeds.
        """
        kept = truncate_logits(scaled_logits(logits, self._sampling.temperature), self._sampling)
        if self._sampling.is_greedy:
            tokens = kept.argmax(dim=-1)
        else:
            cumulative = kept.softmax(dim=-1).cumsum(dim=-1)
            targets = self._uniforms[:, self._step, None] * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1).clamp(max=kept.shape[-1] - 1)
        self._step += 1
        return tokens, token_logprobs(kept, tokens)
