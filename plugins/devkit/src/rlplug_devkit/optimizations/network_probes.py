"""Probes of other networks than a plain policy: with adapters, of large activations, with a bias; and of a critic."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlplug.distributed.mesh import local_part
from rlplug.errors import ConfigError
from rlplug.models.build import build_policy
from rlplug.models.critic import CriticConfig
from rlplug.models.critic.network import build_critic
from rlplug.models.forward import critic_forward
from rlplug.models.lm_head import LogprobRequest, lm_head_of
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.packing import pack
from rlplug.types import SamplingParams
from rlplug_devkit.optimizations.size_probes import SizeProbes
from rlplug_devkit.trainers.cases import rows

ADAPTERS: Final = LoRAConfig(rank=2, seed=4)
CRITIC: Final = CriticConfig(seed=6)
LARGE: Final = 2.0**17
"""Factor of what blocks add to hidden states: a power of two, by which weights are divided exactly."""
BIAS: Final = 2.0
"""Largest bias of the output layer, in nats."""
HEAD_SHAPE: Final = (64, 64, 4096)
"""Tokens, width and vocabulary of an output layer alone: its logits are small beside its logprobs."""
ADDED_BY: Final = ("o_proj.weight", "down_proj.weight")
"""How the names of the weights end whose products are added to hidden states."""


class NetworkProbes(SizeProbes):
    """Probes of other networks than the policy of the first passes."""

    def adapters(self) -> dict[str, Tensor] | str:
        """Return the gradients of a policy with adapters, by parameter, or why such a policy is refused."""
        own = self.policy
        try:
            self.policy, _ = build_policy(self.config, self.optimizations, self.strategy, self.trainer, lora=ADAPTERS)
            self.run(rows(), rows().num_sequences, train=True)
            return whole_gradients(self.policy)
        except ConfigError as refusal:
            return str(refusal)
        finally:
            self.policy = own

    def critic(self) -> dict[str, Any] | str:
        """Return effects on a critic, its values [B, T] and gradients; or why such a critic is refused."""
        try:
            with torch.random.fork_rng(devices=[]):  # torch draws first values of the head, which others replace
                critic, effects = build_critic(
                    CRITIC, self.policy, self.config, self.optimizations, self.strategy, self.trainer
                )
        except ConfigError as refusal:
            return str(refusal)
        (indices,) = self.my_rows(rows().num_sequences, rows().num_sequences)
        taken = rows().map(partial(_take, indices=indices))
        values = taken.grid(critic_forward(critic, pack(taken.flat())))
        values.sin().sum().backward()  # type: ignore[no-untyped-call]
        whole = torch.zeros(rows().input_ids.shape)
        whole[indices] = values.detach()
        dist.all_reduce(whole, group=self.strategy.data_group)
        effects_of_edits = [effect.description for effect in effects[1:]]  # the first is what was loaded
        return {"effects": effects_of_edits, "values": whole, "gradients": whole_gradients(critic)}

    def large(self) -> Tensor:
        """Return values of this policy where blocks add ``LARGE`` times as much to hidden states."""
        weights = [each for name, each in self.policy.named_parameters() if name.endswith(ADDED_BY)]
        with torch.no_grad():
            for weight in weights:
                local_part(weight).mul_(LARGE)
        try:
            return self.run(rows(), rows().num_sequences)
        finally:
            with torch.no_grad():
                for weight in weights:
                    local_part(weight).div_(LARGE)

    def biased(self) -> Tensor:
        """Return values of this policy where its output layer has a bias."""
        layer: Any = self.policy.get_output_embeddings()
        own = layer.bias
        size = self.policy.config.get_text_config().vocab_size
        layer.bias = nn.Parameter(torch.linspace(-BIAS, BIAS, size), requires_grad=False)
        try:
            return self.run(rows(), rows().num_sequences)
        finally:
            layer.bias = own

    def head_alone(self) -> dict[str, float]:
        """Return the root mean square of the errors of an output layer in bfloat16, of logprobs and of entropies.

        They are differences from float64 of the same hidden states and weights.
        """
        (num_tokens, width, size), generator = HEAD_SHAPE, torch.Generator().manual_seed(11)
        hidden = torch.randn(num_tokens, width, generator=generator).bfloat16()
        weight = (torch.randn(size, width, generator=generator) / width).bfloat16()
        targets = torch.randint(size, (num_tokens,), generator=generator)
        request = LogprobRequest(targets, SamplingParams(), "value")
        head = lm_head_of(self.policy)
        with torch.no_grad():
            if head.fused is None:
                output = head.from_logits(nn.functional.linear(hidden, weight), request)
            else:
                output = head.fused(hidden, weight, None, request)
        exact = nn.functional.linear(hidden.double(), weight.double()).log_softmax(dim=-1)
        errors = {
            "logprobs": output.tokens.logprobs - exact.gather(-1, targets[:, None])[:, 0],
            "entropies": output.entropy + (exact.exp() * exact).sum(dim=-1),
        }
        return {name: error.square().mean().sqrt().item() for name, error in errors.items()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a sharded model's parameters, by name. Collective."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def _take(tensor: Tensor, indices: list[int]) -> Tensor:
    return tensor[indices]
