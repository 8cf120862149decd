"""How the networks of a run see a micro-batch: its rows packed into one, their results back in their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlplug.models.lm_head import EntropyMode, LogprobRequest, lm_head_of
from rlplug.models.packing import PackedMicroBatch
from rlplug.types import SamplingParams


@dataclass(frozen=True)
class PolicyOutput:
    """What one forward pass says of the tokens of a batch; 0 where ``response_mask`` is false, however rows are cut."""

    logprobs: Tensor
    """float32 [B, T]: under the tempered distribution, which is what trains"""
    entropy: Tensor
    """float32 [B, T], in nats; 0 when it was not asked for"""
    sampled_logprobs: Tensor
    """float32 [B, T], no gradient: under the distribution that was sampled, top-k and top-p included"""
    hidden: Tensor
    """[K, D], in the policy's dtype: what the output layer read to predict the K tokens that train"""


def policy_forward(
    model: nn.Module, micro_batch: PackedMicroBatch, sampling: SamplingParams, entropy_mode: EntropyMode
) -> PolicyOutput:
    """Run the policy on a micro-batch. Logits are computed only where the next token trains."""
    tokens = micro_batch.tokens
    request = LogprobRequest(tokens.targets, sampling, entropy_mode)
    inputs = tokens.model_inputs() | {"logits_to_keep": tokens.predicting}
    scores, hidden = lm_head_of(model).run(model, request, **inputs)
    return PolicyOutput(
        tokens.unpack(scores.logprobs), tokens.unpack(scores.entropy), tokens.unpack(scores.sampled_logprobs), hidden
    )


def critic_forward(critic: nn.Module, micro_batch: PackedMicroBatch) -> Tensor:
    """Return float32 [B, T] values, aligned like logprobs: ``[b, t]`` is of the state before token ``t``.

    0 where ``response_mask`` is false.
    """
    tokens = micro_batch.tokens
    values: Tensor = critic(tokens.predicting, tokens.model_inputs())
    return tokens.unpack(values)


def head_values(head: nn.Module, output: PolicyOutput, micro_batch: PackedMicroBatch) -> Tensor:
    """Return the same from a value head on the policy's trunk."""
    values: Any = head(output.hidden)
    return micro_batch.tokens.unpack(values)
