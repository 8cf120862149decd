"""Logprobs and entropies from a model's hidden states: the LM head, and where optimisations replace a part of it.

By default the output layer's logits [K, V] are materialised. An optimisation can replace how logprobs or entropies are
computed from logits, or replace the output layer with a function that goes from hidden states to logprobs and never
holds all logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlplug.errors import ConfigError
from rlplug.ops import entropy, scaled_logits, token_logprobs, truncate_logits
from rlplug.types import SamplingParams

EntropyMode: TypeAlias = Literal["none", "value", "gradient"]
"""Whether a forward pass computes entropies, and with gradients."""


@dataclass(frozen=True)
class LogprobRequest:
    """The K next tokens to evaluate, and what to compute for each."""

    targets: Tensor
    """int64 [K]: ids of the tokens"""
    sampling: SamplingParams
    """How the tokens were drawn."""
    entropy_mode: EntropyMode
    """Whether entropies are computed, and with gradients."""

    @property
    def needs_truncation(self) -> bool:
        """Whether tokens were drawn from a truncated distribution (top-k, top-p) rather than the tempered one."""
        return self.sampling.is_truncated and not self.sampling.is_greedy


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of tokens under the policy: float32 [K] of a micro-batch, or [N] of a rank's own rows."""

    logprobs: Tensor
    """Logprobs under the tempered distribution, which is what trains."""
    sampled_logprobs: Tensor
    """Logprobs under the distribution that was sampled, top-k and top-p included; no gradient."""

    def detach(self) -> TokenLogprobs:
        """Return the same logprobs without their graph."""
        return TokenLogprobs(self.logprobs.detach(), self.sampled_logprobs)


@dataclass(frozen=True)
class LMHeadOutput:
    """Output of the LM head for K tokens."""

    tokens: TokenLogprobs
    """float32 [K]"""
    entropy: Tensor
    """float32 [K], in nats; 0 when it was not asked for"""


class FusedLMHead(Protocol):
    """Output layer that returns logprobs for hidden states without materialising [K, V] logits."""

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LogprobRequest) -> LMHeadOutput:
        """Return logprobs and entropies.

        Args:
            hidden: [K, D], in the pass's dtype, as are ``weight`` [V, D] and ``bias`` [V].
            weight: The output layer's weight; gathered only while this call and its backward pass run.
            bias: The output layer's bias, if it has one.
            request: The tokens, and what to compute for each.
        """


@dataclass
class LMHead:
    """Computes logprobs and entropies of a model's next tokens; optimisations replace its parts."""

    entropy: Callable[[Tensor], Tensor] = entropy
    """Computes entropies [K] in nats from float32 logits [K, V]."""
    fused: FusedLMHead | None = None
    """Takes the place of the output layer; ``None`` materialises logits."""

    def from_logits(self, logits: Tensor, request: LogprobRequest) -> LMHeadOutput:
        """Return logprobs and entropies from logits [K, V] of any float dtype."""
        logits = scaled_logits(logits, request.sampling.temperature)
        logprobs = token_logprobs(logits, request.targets)
        sampled = logprobs.detach()
        if request.needs_truncation:
            with torch.no_grad():
                truncated = truncate_logits(logits, request.sampling, keep=request.targets)
                sampled = token_logprobs(truncated, request.targets)
        entropies = torch.zeros_like(sampled)
        if request.entropy_mode != "none":
            with torch.set_grad_enabled(request.entropy_mode == "gradient" and torch.is_grad_enabled()):
                entropies = self.entropy(logits)
        return LMHeadOutput(TokenLogprobs(logprobs, sampled), entropies)

    def run(self, model: Any, request: LogprobRequest, **inputs: Any) -> tuple[LMHeadOutput, Tensor]:
        """Run ``model``; return logprobs and entropies, and the hidden states [K, D] that its output layer read.

        Args:
            model: A network as :class:`rlplug.interfaces.ModelTrainer` describes it, such as one of transformers.
            request: The tokens that follow the positions ``inputs["logits_to_keep"]``, int64 [K].
            inputs: Arguments of the model's forward method, for one row of tokens.

        Raises:
            ConfigError: The model edits its logits after the output layer, and the LM head is fused.
        """
        output_layer = model.get_output_embeddings()
        with _captured_input(output_layer) as captured:
            if self.fused is None:
                output = self.from_logits(model(**inputs).logits[0], request)
            else:
                output = _run_fused(model, output_layer, self.fused, request, inputs)
        return output, captured[0][0]


def lm_head_of(model: nn.Module) -> LMHead:
    """Return the LM head of ``model``, made on the first call; optimisations edit it."""
    attributes = vars(model)  # a plain attribute: nn.Module would make it a part of the state dict
    if "rlplug_lm_head" not in attributes:
        attributes["rlplug_lm_head"] = LMHead()
    lm_head: LMHead = attributes["rlplug_lm_head"]
    return lm_head


def share_lm_head(model: nn.Module, other: nn.Module) -> None:
    """Give ``other`` the LM head of ``model``, with what optimisations make of it."""
    vars(other)["rlplug_lm_head"] = lm_head_of(model)


def _run_fused(
    model: Any, output_layer: Any, fused: FusedLMHead, request: LogprobRequest, inputs: dict[str, Any]
) -> LMHeadOutput:
    """Run ``model`` with an output layer that returns [1, K, 3] logprobs, entropies and sampled logprobs for logits.

    They leave the model as its output, where FSDP hooks into the backward pass.
    """
    returned: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        weight = output_layer.weight
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # it may be split over the tensor axis
        output = fused(hidden[0], whole, output_layer.bias, request)
        columns = (output.tokens.logprobs, output.entropy, output.tokens.sampled_logprobs)
        returned.append(torch.stack([column[None] for column in columns], dim=-1))  # FSDP wants no view
        return returned[0]

    own = vars(output_layer).get("forward")
    output_layer.forward = forward  # on the instance: the layer's own hooks, such as FSDP's, still run around it
    try:
        logits = model(**inputs).logits
    finally:
        del output_layer.forward
        if own is not None:
            output_layer.forward = own
    if logits is not returned[0]:
        raise ConfigError(
            f"{type(model).__name__} edits its logits after the output layer (a soft cap or scale), which "
            f"{type(fused).__name__} leaves out: remove it from model.optimizations."
        )
    logprobs, entropies, sampled = logits[0].unbind(dim=-1)
    return LMHeadOutput(TokenLogprobs(logprobs, sampled.detach()), entropies)


@contextmanager
def _captured_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of ``layer``; ``output_hidden_states`` would keep those of every layer in memory."""
    captured: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
    try:
        yield captured
    finally:
        handle.remove()
