"""Forward passes of policy and critic over a packed micro-batch, with results for each of its K trainable tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from rlplug.models.lm_head import EntropyMode, LogprobRequest, TokenLogprobs, lm_head_of
from rlplug.models.packing import PackedMicroBatch
from rlplug.types import SamplingParams

if TYPE_CHECKING:
    from rlplug.interfaces.router_replay import RouterReplay


@dataclass(frozen=True)
class PolicyOutput:
    """Results of the policy's forward pass, the same on all ranks that share the row."""

    tokens: TokenLogprobs
    """float32 [K]"""
    entropy: Tensor
    """float32 [K], in nats; 0 when it was not asked for"""
    hidden: Tensor
    """[k, D], in the policy's dtype: hidden states from which this rank's output layer predicts"""
    num_differing: Tensor | None = None
    """int64 []: (token, layer) pairs of this row where a router's own choice is not the replayed one, the same on all
    sequence ranks; ``None`` without router replay"""


def router_replay_of(network: nn.Module) -> RouterReplay | None:
    """Return the router replay of a network, or ``None`` where its routers decide on their own."""
    replay: RouterReplay | None = vars(network).get("rlplug_router_replay")
    return replay


def attach_router_replay(network: nn.Module, replay: RouterReplay) -> None:
    """Make forward passes of ``network`` replay the experts of their micro-batch."""
    vars(network)["rlplug_router_replay"] = replay


def policy_forward(
    model: nn.Module, micro_batch: PackedMicroBatch, sampling: SamplingParams, entropy_mode: EntropyMode
) -> PolicyOutput:
    """Run the policy on a micro-batch. Logits are computed only where the next token trains."""
    packed = micro_batch.packed
    request = LogprobRequest(packed.targets, sampling, entropy_mode)
    inputs = packed.model_inputs() | {"logits_to_keep": packed.predicting}
    replay = router_replay_of(model)
    if replay is not None:
        replay.set(packed.routed_experts)
    output, hidden = lm_head_of(model).run(model, request, **inputs)
    tokens = TokenLogprobs(
        packed.of_all_parts(output.tokens.logprobs), packed.of_all_parts(output.tokens.sampled_logprobs)
    )
    num_differing = None
    if replay is not None and packed.routed_experts is not None:
        num_differing = replay.num_differing()
        if packed.sequence_group is not None:
            dist.all_reduce(num_differing, group=packed.sequence_group)
    return PolicyOutput(tokens, packed.of_all_parts(output.entropy), hidden, num_differing)


def critic_forward(critic: nn.Module, micro_batch: PackedMicroBatch) -> Tensor:
    """Return the values of a critic with a trunk of its own, float32 [K], each of the state before its token."""
    packed = micro_batch.packed
    values: Tensor = critic(packed.predicting, packed.model_inputs())
    return packed.of_all_parts(values)


def value_head_forward(head: nn.Module, output: PolicyOutput, micro_batch: PackedMicroBatch) -> Tensor:
    """Return the values of a head on the policy's trunk, as :func:`critic_forward` does."""
    values: Any = head(output.hidden)
    return micro_batch.packed.of_all_parts(values)
