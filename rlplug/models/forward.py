"""Forward passes of policy and critic over a packed micro-batch, with results as padded [B, T] tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlplug.models.lm_head import EntropyMode, LogprobRequest, lm_head_of
from rlplug.models.packing import PackedMicroBatch
from rlplug.types import SamplingParams


@dataclass(frozen=True)
class PolicyOutput:
    """Results of the policy's forward pass; [B, T] tensors are 0 where ``response_mask`` is false."""

    logprobs: Tensor
    """float32 [B, T]: under the tempered distribution, which is what trains"""
    entropy: Tensor
    """float32 [B, T], in nats; 0 when it was not asked for"""
    sampled_logprobs: Tensor
    """float32 [B, T], no gradient: under the distribution that was sampled, top-k and top-p included"""
    hidden: Tensor
    """[K, D], in the policy's dtype: hidden states from which the output layer predicts the K tokens that train"""


def policy_forward(
    model: nn.Module, micro_batch: PackedMicroBatch, sampling: SamplingParams, entropy_mode: EntropyMode
) -> PolicyOutput:
    """Run the policy on a micro-batch. Logits are computed only where the next token trains."""
    tokens = micro_batch.tokens
    request = LogprobRequest(tokens.targets, sampling, entropy_mode)
    inputs = tokens.model_inputs() | {"logits_to_keep": tokens.predicting}
    result, hidden = lm_head_of(model).run(model, request, **inputs)
    return PolicyOutput(
        tokens.unpack(result.logprobs), tokens.unpack(result.entropy), tokens.unpack(result.sampled_logprobs), hidden
    )


def critic_forward(critic: nn.Module, micro_batch: PackedMicroBatch) -> Tensor:
    """Return the critic's values, float32 [B, T]: ``[b, t]`` is the value of the state before token ``t``.

    Values are 0 where ``response_mask`` is false.
    """
    tokens = micro_batch.tokens
    values: Tensor = critic(tokens.predicting, tokens.model_inputs())
    return tokens.unpack(values)


def head_values(head: nn.Module, output: PolicyOutput, micro_batch: PackedMicroBatch) -> Tensor:
    """Return the values of a value head on the policy's trunk, as :func:`critic_forward` does."""
    values: Any = head(output.hidden)
    return micro_batch.tokens.unpack(values)
