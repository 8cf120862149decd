"""Group relative policy optimisation.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv:2402.03300.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlplug.errors import ConfigError
from rlplug.interfaces import Advantages, Algorithm, Denominators, LossOutput, Needs
from rlplug.ops.masking import masked_sum
from rlplug.types import Batch


class GRPO(Algorithm):
    r"""Advantages relative to the group, PPO's clipped ratio, and optionally a KL penalty in the loss.

    For completion i of a group with rewards r (equation 1 and section 4.1.2 of arXiv:2402.03300):

    .. math::
        A_{i,t} = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon} \qquad
        \rho_{i,t} = \exp(\log\pi_{i,t} - \log\pi^{old}_{i,t})

        L = -\sum_{i,t} w_{i,t} \left[ \min(\rho A, \mathrm{clip}(\rho, 1-c, 1+c) A)
            - \beta\, (e^{d} - 1 - d) \right], \quad d = \log\pi^{ref}_{i,t} - \log\pi_{i,t}

    ``aggregation`` sets the weights w, always by counts of the whole mini-batch over all ranks:
    ``token`` gives every token 1 / (number of tokens), as DAPO does (arXiv:2503.14476, equation 8);
    ``sequence`` gives the tokens of completion i 1 / (its length x number of completions), as in the GRPO paper.

    Args:
        clip: c, how far the ratio may move from 1 before its gradient stops.
        kl_coefficient: beta, weight of the k3 estimate of KL(policy || reference). Above 0 a frozen reference policy
            is kept, which takes the memory of a second model.
        aggregation: ``token`` or ``sequence``.
        normalize_std: Divide by the group's standard deviation. Off, advantages are only centred, as in Dr.GRPO
            (arXiv:2503.20783).
        epsilon: Added to the standard deviation; groups whose rewards are all equal get advantage 0.
    """

    def __init__(
        self,
        clip: float = 0.2,
        kl_coefficient: float = 0.0,
        aggregation: Literal["token", "sequence"] = "token",
        normalize_std: bool = True,
        epsilon: float = 1e-4,
    ) -> None:
        if not 0 < clip < 1:
            raise ConfigError(f"GRPO's clip is {clip}: give a number between 0 and 1, such as 0.2.")
        if kl_coefficient < 0:
            raise ConfigError(f"GRPO's kl_coefficient is {kl_coefficient}: give 0 or more.")
        if aggregation not in ("token", "sequence"):
            raise ConfigError(f"GRPO's aggregation is {aggregation!r}: give token or sequence.")
        self.clip = clip
        self.kl_coefficient = kl_coefficient
        self.aggregation = aggregation
        self.normalize_std = normalize_std
        self.epsilon = epsilon

    @property
    def needs(self) -> Needs:
        return Needs(reference_policy=self.kl_coefficient > 0)

    def advantages(self, batch: Batch) -> Advantages:
        """Return A of every trainable token; the standard deviation is the unbiased one, over valid rewards."""
        advantages = torch.zeros_like(batch.rewards)
        num_degenerate = 0
        groups = sorted(set(batch.group_index.tolist()))
        for group in groups:
            rows = (batch.group_index == group) & batch.reward_valid
            rewards = batch.rewards[rows]
            if len(rewards) < 2 or torch.all(rewards == rewards[0]):
                num_degenerate += 1
                continue
            centred = rewards - rewards.mean()
            advantages[rows] = centred / (rewards.std() + self.epsilon) if self.normalize_std else centred
        return Advantages(
            advantages=torch.where(batch.response_mask, advantages[:, None], 0.0),
            metrics={"advantages/degenerate_groups": num_degenerate / len(groups)},
        )

    def loss(
        self,
        micro_batch: Batch,
        logprobs: Tensor,
        entropy: Tensor,
        values: Tensor | None,
        denominators: Denominators,
    ) -> LossOutput:
        """Return the micro-batch's share of L."""
        mask, advantages = micro_batch.response_mask, micro_batch.advantages
        assert advantages is not None
        assert micro_batch.old_logprobs is not None
        ratio = (logprobs - micro_batch.old_logprobs).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        num_tokens = max(denominators.num_tokens, 1)
        was_clipped = (clipped * advantages < ratio * advantages).float()
        metrics = {"policy/clip_fraction": masked_sum(was_clipped, mask) / num_tokens}
        if self.kl_coefficient > 0:
            assert micro_batch.ref_logprobs is not None
            difference = micro_batch.ref_logprobs - logprobs
            kl = difference.expm1() - difference
            per_token = per_token + self.kl_coefficient * kl
            metrics["policy/kl"] = masked_sum(kl.detach(), mask) / num_tokens
        return LossOutput(self._aggregate(per_token, mask, denominators), metrics)

    def _aggregate(self, per_token: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
        if self.aggregation == "token":
            return masked_sum(per_token, mask) / max(denominators.num_tokens, 1)
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        return masked_sum(per_token / lengths, mask) / max(denominators.num_sequences, 1)
