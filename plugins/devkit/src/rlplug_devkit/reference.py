"""Reference for engines: transformers' forward in float32, without KV cache, padding or rlplug's operators."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy
import numpy.typing
import torch
from transformers import AutoModelForCausalLM

from rlplug.interfaces.weight_sync import AdapterWeights, Bucket, FP8Weights
from rlplug.models.hf_files import pretrained
from rlplug.token_arrays import TokenIds
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets
from rlplug.weight_sync.fp8_quantize import dequantize_blocks, quantize_blocks
from rlplug.weight_sync.hf_names import hf_views

Array = numpy.typing.NDArray[numpy.float64]


@dataclass(frozen=True)
class Tolerances:
    """Largest differences between logprobs of an engine and the reference, in nats, over the tokens of one check.

    Attributes:
        outside: Share of sampled tokens that the reference's top-k and top-p exclude, because of round-off at the
            border.
    """

    mean: float
    max: float
    outside: float


FLOAT32 = Tolerances(mean=1e-5, max=2e-4, outside=0.0)
BFLOAT16 = Tolerances(mean=0.05, max=0.5, outside=0.03)
FP8 = Tolerances(mean=0.4, max=3.0, outside=0.05)
"""Tolerances of FP8: twice the differences from rounding activations to e4m3 in groups of 128, which are at most 0.21
and 1.6 on the kit's models. Scales of another block, of another expert or of the former sync would differ by 0.6 to 5
on average."""


@dataclass(frozen=True)
class Difference:
    """Difference between an engine's logprobs and the reference's, in nats, over ``num_tokens`` tokens."""

    mean: float
    max: float
    outside: float
    num_tokens: int

    def within(self, tolerances: Tolerances) -> bool:
        """Return whether all three numbers are within the tolerances; NaN is not."""
        return self.mean <= tolerances.mean and self.max <= tolerances.max and self.outside <= tolerances.outside


class ReferencePolicy:
    """Model with the weights that an engine may hold, which computes their logits in float32.

    Args:
        path: Hugging Face folder of a model with RMS norms and a residual stream, such as Llama or Qwen.
        dtype: Dtype to which the weights are rounded, and in which they are sent.
        fp8: Weights that are sent in FP8 instead; the reference computes with their values times their scales.
        adapters: Low-rank adapters that are sent beside the weights, with random values; the reference adds them.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        fp8: FP8Weights | None = None,
        adapters: AdapterWeights | None = None,
    ) -> None:
        self.dtype = dtype
        self.fp8 = fp8
        self.adapters = adapters
        self.model: Any = pretrained(
            AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._drawn = self._draw_adapters(seed=0)
        self._round()
        self.written: set[str] = set()
        """Names of sent tensors that the engine has written to."""

    @property
    def bos(self) -> int:
        """Token id that begins texts of this model."""
        return int(self.model.config.bos_token_id or 0)

    @property
    def ends(self) -> frozenset[int]:
        """Token ids of ``generation_config.json`` that end a completion."""
        ends = self.model.generation_config.eos_token_id
        return frozenset(ends if isinstance(ends, list) else [ends])

    @property
    def pad(self) -> int:
        """Token id of padding."""
        return int(self.model.config.pad_token_id or 0)

    def num_bytes(self) -> int:
        """Return the number of bytes of all weights, in the dtype in which they are sent."""
        return sum(int(parameter.numel()) * self.dtype.itemsize for parameter in self.model.parameters())

    def largest_bytes(self) -> int:
        """Return the number of bytes of the largest weight, in the dtype in which it is sent."""
        return max(int(parameter.numel()) * self.dtype.itemsize for parameter in self.model.parameters())

    def buckets(self, device: torch.device, max_bytes: int = 1 << 30, has_frozen: bool = False) -> Iterator[Bucket]:
        """Yield the weights as a trainer does. A bucket is filled with NaN before the next one.

        Args:
            device: Device of the buckets.
            max_bytes: Largest size of a bucket of weights.
            has_frozen: Whether only the adapters are sent.
        """
        weights = iter(()) if has_frozen else weight_buckets(self.model, self.dtype, max_bytes, self.fp8)
        for bucket in chain(weights, [list(self._drawn.items())] if self._drawn else ()):
            lent = [(name, tensor.to(device, copy=True)) for name, tensor in bucket]
            yield lent
            for (name, own), (_, tensor) in zip(bucket, lent, strict=True):
                if not torch.equal(as_bytes(own), as_bytes(tensor.to(own.device))):
                    self.written.add(name)
                tensor.fill_(math.nan)

    @torch.no_grad()
    def changed(self, size: float) -> ReferencePolicy:
        """Return a reference with changed weights: each tensor gets noise of ``size`` times its standard deviation.

        Where there are adapters, they are drawn anew, and all else stays.
        """
        other = copy.deepcopy(self)
        if self.adapters is not None:
            other._drawn = self._draw_adapters(seed=1)
            other._round()
            return other
        generator = torch.Generator().manual_seed(1)
        for parameter in other.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size * float(parameter.std()))
        other._round()
        return other

    def nudged(self, prompts: Sequence[Sequence[int]], size: float) -> ReferencePolicy:
        """Return a reference after a step of ``size`` in each weight: the first step of Adam with that learning rate.

        The step makes the likeliest next tokens of ``prompts`` likelier: all weights move in the direction that
        changes logprobs most. A weight moves by one unit in the last place at least, so that it changes in any dtype.
        """
        other = copy.deepcopy(self)
        with torch.enable_grad():
            logprobs = [other.model(torch.tensor([list(ids)])).logits[0, -1].log_softmax(-1).max() for ids in prompts]
            torch.stack(logprobs).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in other.model.parameters():
                exact = parameter.to(self.dtype)
                unit = (exact.abs().float() * torch.finfo(self.dtype).eps).clamp(min=size)
                parameter.add_(unit * parameter.grad.sign())
                parameter.grad = None
        other._round()
        return other

    @torch.no_grad()
    def unigram(self, end_token_ids: Sequence[int], end_probability: float) -> ReferencePolicy:
        """Return a reference in which each token is an end token with ``end_probability``, whatever the prefix.

        All other tokens are equally likely. The layers add nothing, every embedding points along the first
        dimension, and norms leave it at ``sqrt(D)``.
        """
        other = copy.deepcopy(self)
        for name, parameter in other.model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        num_tokens, hidden = other.model.get_input_embeddings().weight.shape
        odds = end_probability / (1 - end_probability) * (num_tokens - len(end_token_ids)) / len(end_token_ids)
        logits = torch.full((num_tokens,), 64.0)  # all positive, so that tied embeddings all point the same way
        logits[list(end_token_ids)] += max(math.log(odds), -60.0)
        other.model.get_input_embeddings().weight[:, 0] = logits / hidden**0.5
        other.model.get_output_embeddings().weight[:, 0] = logits / hidden**0.5
        other._round()
        return other

    @torch.no_grad()
    def logits(self, prompt_ids: Sequence[int], token_ids: Sequence[int] | TokenIds = ()) -> Array:
        """Return the logits of each token of a completion, and of the next one: float64 [tokens + 1, V]."""
        ids = torch.tensor([[*prompt_ids, *token_ids]])
        logits: Array = self._calculating(ids, use_cache=False).logits[0, len(prompt_ids) - 1 :].double().numpy()
        return logits

    @torch.no_grad()
    def _round(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(parameter.to(self.dtype))
        self._calculating = self.model
        if self.fp8 is not None:
            self._calculating = copy.deepcopy(self.model)
            weights = hf_views(self._calculating)
            for name in self.fp8.quantized:
                values, scales = quantize_blocks(weights[name], self.dtype, self.fp8.power_of_two_scales)
                weights[name].copy_(dequantize_blocks(values, scales, torch.float32))
        if self.adapters is not None:
            self._calculating = copy.deepcopy(self.model)
            weights = hf_views(self._calculating)
            for module in self.adapters.modules:
                down, up = (self._drawn[name].float() for name in AdapterWeights.names(module))
                weights[f"{module}.weight"].addmm_(up, down, alpha=self.adapters.alpha / self.adapters.rank)

    def _draw_adapters(self, seed: int) -> dict[str, torch.Tensor]:
        """Return random adapters in ``dtype``, whose updates are about as large as the weights of the tiny models."""
        if self.adapters is None:
            return {}
        weights, generator = hf_views(self.model), torch.Generator().manual_seed(seed)
        drawn: dict[str, torch.Tensor] = {}
        for module in self.adapters.modules:
            num_rows, num_columns = weights[f"{module}.weight"].shape
            down, up = AdapterWeights.names(module)
            drawn[down] = torch.randn(self.adapters.rank, num_columns, generator=generator) / num_columns**0.5
            drawn[up] = torch.randn(num_rows, self.adapters.rank, generator=generator) / 5
        return {name: tensor.to(self.dtype) for name, tensor in drawn.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [n]: NaN equals itself there."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def sampled_distribution(logits: Array, sampling: SamplingParams) -> Array:
    """Return the probabilities [..., V] with which tokens are drawn; for greedy, the untempered ones.

    Temperature comes first, then top-k, then top-p of the remaining tokens; the likeliest token always stays.
    """
    scaled = logits / (sampling.temperature or 1.0)
    probabilities: Array = numpy.exp(scaled - scaled.max(axis=-1, keepdims=True))
    order = numpy.argsort(-probabilities, axis=-1)
    ordered = numpy.take_along_axis(probabilities, order, axis=-1)
    ordered[..., sampling.top_k or ordered.shape[-1] :] = 0
    ordered /= ordered.sum(axis=-1, keepdims=True)
    if sampling.top_p < 1:
        ordered[numpy.cumsum(ordered, axis=-1) - ordered >= sampling.top_p] = 0
        ordered /= ordered.sum(axis=-1, keepdims=True)
    numpy.put_along_axis(probabilities, order, ordered, axis=-1)
    return probabilities


def compare(
    policy: ReferencePolicy, requests: Sequence[Request], completions: Sequence[Completion], sampling: SamplingParams
) -> Difference:
    """Return the difference from the reference's logprobs, and the share of tokens that the reference excludes."""
    differences, num_outside = [numpy.zeros(0)], 0
    for request, completion in zip(requests, completions, strict=True):
        logits = policy.logits(request.prompt_ids, completion.token_ids)[:-1]
        chosen = numpy.array(completion.token_ids, dtype=int)[:, None]
        expected = numpy.take_along_axis(sampled_distribution(logits, sampling), chosen, axis=-1)[:, 0]
        inside = expected > 0
        num_outside += int((~inside).sum())
        differences.append(numpy.abs(numpy.log(expected[inside]) - numpy.array(completion.logprobs)[inside]))
    all_differences = numpy.concatenate(differences)
    num_tokens = len(all_differences) + num_outside
    assert len(all_differences) > 0, "nothing to compare: every completion is empty, or no token can be sampled"
    return Difference(float(all_differences.mean()), float(all_differences.max()), num_outside / num_tokens, num_tokens)


def greedy_gap(policy: ReferencePolicy, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """Return the largest gap in nats between the reference's best token and a completion's token."""
    gaps = [0.0]
    for request, completion in zip(requests, completions, strict=True):
        logits = policy.logits(request.prompt_ids, completion.token_ids)[:-1]
        chosen = numpy.take_along_axis(logits, numpy.array(completion.token_ids, dtype=int)[:, None], axis=-1)[:, 0]
        gaps.append(float((logits.max(axis=-1) - chosen).max(initial=0.0)))
    return max(gaps)


def chi_square(counts: Array, probabilities: Array) -> tuple[float, float]:
    """Return Pearson's statistic over cells that expect 5 or more, and the bound that it exceeds once in a million.

    The bound on the tail of chi-square is that of Laurent and Massart (2000), lemma 1:
    P(X >= k + 2 sqrt(k x) + 2 x) <= exp(-x).
    """
    expected = counts.sum() * probabilities
    cells = expected >= 5
    observed, expected = (numpy.append(part[cells], part[~cells].sum()) for part in (counts, expected))
    free, tail = int(cells.sum()), math.log(1e6)
    statistic = ((observed - expected) ** 2 / numpy.maximum(expected, 5)).sum()
    return float(statistic), free + 2 * math.sqrt(free * tail) + 2 * tail
