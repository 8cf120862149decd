"""From hidden states to logprobs and entropies: how a model's output layer is read, and where optimisations step in.

By default the layer's logits [K, V] are materialised. An optimisation can exchange how scores or entropies come from
logits, or replace the layer by a function that goes from hidden states to scores without ever holding the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rlplug.errors import ConfigError
from rlplug.ops import entropy, scaled_logits, token_logprobs, truncate_logits
from rlplug.types import SamplingParams

EntropyMode: TypeAlias = Literal["none", "value", "gradient"]
"""What a forward pass computes of the entropy."""


@dataclass(frozen=True)
class LogprobRequest:
    """What is asked about K next tokens."""

    targets: Tensor
    """int64 [K]: the tokens"""
    sampling: SamplingParams
    entropy_mode: EntropyMode

    @property
    def needs_truncation(self) -> bool:
        """Whether the distribution that was sampled is another than the tempered one."""
        return self.sampling.is_truncated and not self.sampling.is_greedy


@dataclass(frozen=True)
class TokenLogprobs:
    """Logprobs of tokens under the policy: float32 [K] from the LM head, or [B, T] in the rows of a batch."""

    logprobs: Tensor
    """Under the tempered distribution, which is what trains."""
    sampled_logprobs: Tensor
    """Under the distribution that was sampled, top-k and top-p included; no gradient."""

    def detach(self) -> TokenLogprobs:
        """Return the same without the graph."""
        return TokenLogprobs(self.logprobs.detach(), self.sampled_logprobs)


@dataclass(frozen=True)
class LMHeadOutput:
    """Output of the LM head for K tokens."""

    tokens: TokenLogprobs
    """float32 [K]"""
    entropy: Tensor
    """float32 [K], in nats; 0 when it was not asked for"""


class FusedLMHead(Protocol):
    """Computes scores from hidden states and the output layer's weight, without materialising [K, V] logits."""

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LogprobRequest) -> LMHeadOutput:
        """Return the scores.

        Args:
            hidden: [K, D], in the pass's dtype, as are ``weight`` [V, D] and ``bias`` [V].
            weight: Of the output layer; gathered only while this call and its backward pass run.
            bias: Of the output layer, if it has one.
            request: What is asked.
        """


@dataclass
class LMHead:
    """How a model's hidden states become scores; optimisations exchange its parts."""

    entropy: Callable[[Tensor], Tensor] = entropy
    """Entropies [K] in nats of float32 logits [K, V]."""
    fused: FusedLMHead | None = None

    def from_logits(self, logits: Tensor, request: LogprobRequest) -> LMHeadOutput:
        """Return the scores from logits [K, V] of any float dtype."""
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
        """Run ``model`` and return the scores, and the hidden states [K, D] that its output layer read.

        Args:
            model: A causal language model of transformers.
            request: What is asked of the positions that ``inputs["logits_to_keep"]``, int64 [K], names.
            inputs: Of the model's forward method, for one row of tokens.

        Raises:
            ConfigError: The model edits its logits after the output layer, and the scores are fused.
        """
        layer = model.get_output_embeddings()
        with _input_of(layer) as hidden:
            if self.fused is None:
                scores = self.from_logits(model(**inputs).logits[0], request)
            else:
                scores = self._run_fused(model, layer, self.fused, request, inputs)
        return scores, hidden[0][0]

    def _run_fused(
        self, model: Any, layer: Any, fused: FusedLMHead, request: LogprobRequest, inputs: dict[str, Any]
    ) -> LMHeadOutput:
        """Let the output layer return scores in place of logits, so that FSDP's hooks see them leave the model."""
        returned: list[Tensor] = []

        def score(hidden: Tensor) -> Tensor:
            scores = fused(hidden[0], layer.weight, layer.bias, request)
            columns = (scores.tokens.logprobs, scores.entropy, scores.tokens.sampled_logprobs)
            returned.append(torch.stack([column[None] for column in columns], dim=-1))  # FSDP wants no view
            return returned[0]

        layer.forward = score  # of this one module, inside its hooks
        try:
            output = model(**inputs).logits
        finally:
            del layer.forward
        if output is not returned[0]:
            raise ConfigError(
                f"{type(model).__name__} edits its logits after the output layer (a soft cap or scale), which "
                f"{type(fused).__name__} leaves out: remove it from model.optimizations."
            )
        logprobs, entropies, sampled = output[0].unbind(dim=-1)
        return LMHeadOutput(TokenLogprobs(logprobs, sampled.detach()), entropies)


def lm_head_of(model: nn.Module) -> LMHead:
    """Return the scorer of ``model``, which optimisations may edit."""
    if "rlplug_lm_head" not in vars(model):
        vars(model)["rlplug_lm_head"] = LMHead()  # a plain attribute: neither parameter nor part of a checkpoint
    scorer: LMHead = vars(model)["rlplug_lm_head"]
    return scorer


@contextmanager
def _input_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the hidden states that the output layer is given; keeping those of every layer would cost memory."""
    hidden: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    try:
        yield hidden
    finally:
        handle.remove()
