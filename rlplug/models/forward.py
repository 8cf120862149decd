"""How the networks of a run see a micro-batch: its rows packed into one, their results back in their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rlplug.models.lm_head import EntropyMode, LogprobRequest, lm_head_of
from rlplug.models.packing import PackedTokens
from rlplug.types import Batch, SamplingParams


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


def policy_forward(model: nn.Module, batch: Batch, sampling: SamplingParams, entropy_mode: EntropyMode) -> PolicyOutput:
    """Run the policy on a packed batch. Logits are computed only where the next token trains."""
    packed = packed_tokens(batch)
    request = LogprobRequest(packed.targets, sampling, entropy_mode)
    inputs = packed.model_inputs() | {"logits_to_keep": packed.predicting}
    scores, hidden = lm_head_of(model).run(model, request, **inputs)
    return PolicyOutput(
        packed.unpack(scores.logprobs), packed.unpack(scores.entropy), packed.unpack(scores.sampled_logprobs), hidden
    )


def critic_forward(critic: nn.Module, batch: Batch) -> Tensor:
    """Return float32 [B, T] values, aligned like logprobs: ``[b, t]`` is of the state before token ``t``.

    0 where ``response_mask`` is false.
    """
    packed = packed_tokens(batch)
    values: Tensor = critic(packed.predicting, packed.model_inputs())
    return packed.unpack(values)


def head_values(head: nn.Module, output: PolicyOutput, batch: Batch) -> Tensor:
    """Return the same from a value head on the policy's trunk."""
    values: Any = head(output.hidden)
    return packed_tokens(batch).unpack(values)


def packed_tokens(batch: Batch) -> PackedTokens:
    assert batch.packed is not None, "a model runs on a batch that Batch.pack has packed"
    return batch.packed
