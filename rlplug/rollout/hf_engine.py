"""``HFRollout``: transformers' own ``generate`` as a rollout engine. Slow beside vLLM, and runs everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from rlplug.errors import ConfigError
from rlplug.interfaces.memory import EngineMemory, EngineMemoryRequest
from rlplug.interfaces.rollout import EngineCapabilities, Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket, FP8Weights, SyncReport
from rlplug.ops import scaled_logits, token_logprobs, truncate_logits
from rlplug.rollout.engines import max_completion_tokens
from rlplug.types import Completion, Request, SamplingParams
from rlplug.weight_sync.fp8_quantize import dequantize_blocks
from rlplug.weight_sync.hf_names import hub_views
from rlplug.weight_sync.manifest import expected_tensors
from rlplug.weight_sync.receive_checks import WeightSyncValidator

SAMPLER_BYTES: Final = 20
"""Bytes a logit: float32 scores, tempered, as probabilities, their running sum, and what leaves one finite."""


class HFRollout(RolloutEngine):
    """Generates with a copy of the policy in the trainer's process, one copy per rank.

    Each request draws from its own seed, so a completion does not depend on which other requests share its batch or
    on the number of ranks, up to round-off. Weights that come in FP8 are rounded so, and it calculates with them in the
    policy's dtype.

    Args:
        max_batch_size: Requests that are generated at once; more are done one batch after another.
    """

    capabilities: EngineCapabilities = EngineCapabilities(colocated=True, fp8_refit=True)

    def __init__(self, max_batch_size: int = 256) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"rollout.max_batch_size is {max_batch_size}: give at least 1.")
        self.max_batch_size = max_batch_size
        self._version: int | None = None
        self._num_tokens = 0
        self._seconds = 0.0

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._policy = policy
        self._device = placement.device
        config = AutoConfig.from_pretrained(policy.path)
        with torch.random.fork_rng(devices=[]):  # the random first weights must not move the run's generator
            model: Any = AutoModelForCausalLM.from_config(config, dtype=policy.dtype)
        self._model = model.to(self._device).eval()
        # what a checkpoint's generation_config.json asks for (temperature, top_k, ...) must not reach the sampler
        self._model.generation_config = GenerationConfig()

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        began = time.perf_counter()
        longest = max((request.limit(sampling) for request in requests), default=0)
        # requests that the context cuts short run apart, so that they cut short no other
        by_limit: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            limit = min(longest, max_completion_tokens(request, self._policy))
            by_limit.setdefault(limit, []).append(index)
        completions: dict[int, Completion] = {}
        for num_new, indices in by_limit.items():
            for start in range(0, len(indices), self.max_batch_size):
                chosen = indices[start : start + self.max_batch_size]
                batch = self._generate_batch([requests[index] for index in chosen], sampling, num_new)
                completions |= zip(chosen, batch, strict=True)
        self._num_tokens += sum(len(completion.token_ids) for completion in completions.values())
        self._seconds += time.perf_counter() - began
        return [completions[index] for index in range(len(requests))]

    @torch.no_grad()
    def _generate_batch(self, requests: Sequence[Request], sampling: SamplingParams, num_new: int) -> list[Completion]:
        prompt_ids, attention_mask = self._left_pad([request.prompt_ids for request in requests])
        sampler = _SeededSampler([request.seed for request in requests], sampling, num_new, self._device)
        generated: Any = self._model.generate(
            prompt_ids,
            attention_mask=attention_mask,
            logits_processor=LogitsProcessorList([sampler]),
            generation_config=GenerationConfig(
                do_sample=False,  # the processor has sampled: it leaves one finite logit
                max_new_tokens=num_new,
                eos_token_id=list(self._policy.eos_token_ids),
                pad_token_id=self._policy.pad_token_id,
            ),
        )
        token_ids = generated[:, prompt_ids.shape[1] :].tolist()
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        return [
            self._completion(request, row[: request.limit(sampling)], row_logprobs)
            for request, row, row_logprobs in zip(requests, token_ids, logprobs, strict=True)
        ]

    def _left_pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return prompt ids and attention mask, int64 [B, T]: generation continues at the right edge."""
        longest = max(len(prompt) for prompt in prompts)
        prompt_ids = torch.full((len(prompts), longest), self._policy.pad_token_id)
        attention_mask = torch.zeros_like(prompt_ids)
        for row, prompt in enumerate(prompts):
            prompt_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        return prompt_ids.to(self._device), attention_mask.to(self._device)

    def _completion(self, request: Request, row: list[int], logprobs: list[float]) -> Completion:
        """Cut what ``generate`` appended to ``row`` after the end token."""
        assert self._version is not None
        ends = [index for index, token in enumerate(row) if token in self._policy.eos_token_ids]
        length = ends[0] + 1 if ends else len(row)
        return Completion(
            request_id=request.request_id,
            token_ids=tuple(row[:length]),
            logprobs=tuple(logprobs[:length]),
            finish_reason="stop" if ends else "length",
            policy_version=self._version,
        )

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        mine = hub_views(self._model)
        receipt = WeightSyncValidator(type(self).__name__, expected_tensors(self._model, self._policy))
        for bucket in receipt.count(buckets):
            tensors = dict(bucket)
            for name in tensors.keys() & mine.keys():
                scales = tensors.get(FP8Weights.scale_name(name))
                weight, dtype = tensors[name], mine[name].dtype
                mine[name].copy_(weight if scales is None else dequantize_blocks(weight, scales, dtype))
        self._version = version
        return receipt.report(version)

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        """Return its copy of the policy, and while it generates the cache and the sampler's tensors of one batch."""
        num_rows, weights = min(self.max_batch_size, needs.completions), needs.parameters * policy.dtype.itemsize
        return EngineMemory(
            weights=weights,
            kv_cache=num_rows * needs.longest * needs.kv_bytes_per_token,
            other=num_rows * needs.vocab_size * SAMPLER_BYTES,
            asleep=weights,
            kv_bytes_per_token=needs.kv_bytes_per_token,
            keeps_cache=False,
        )

    def stats(self) -> dict[str, float]:
        stats = {"num_tokens": float(self._num_tokens), "tokens_per_s": self._num_tokens / max(self._seconds, 1e-9)}
        self._num_tokens, self._seconds = 0, 0.0
        return stats

    def close(self) -> None:
        self._model = None


class _SeededSampler(LogitsProcessor):
    """Draws every row's next token from that row's own seed and leaves only it.

    Row ``b`` at step ``i`` inverts the cumulative distribution at ``uniforms[b, i]``, drawn in advance from a
    generator seeded for the row. ``logprobs[i]``, float32 [B], is of the distribution that was sampled.
    """

    def __init__(self, seeds: Sequence[int], sampling: SamplingParams, num_steps: int, device: torch.device) -> None:
        rows = [torch.rand(num_steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        self._uniforms = torch.stack(rows).to(device)
        self._sampling = sampling
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = truncate_logits(scaled_logits(scores, self._sampling.temperature), self._sampling)
        if self._sampling.is_greedy:
            tokens = logits.argmax(dim=-1)
        else:
            cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
            targets = self._uniforms[:, len(self.logprobs), None] * cumulative[:, -1:]
            tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
            tokens = tokens.clamp(max=logits.shape[-1] - 1)
        self.logprobs.append(token_logprobs(logits, tokens))
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)
