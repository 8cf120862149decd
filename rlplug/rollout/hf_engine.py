"""``HFRollout``: rollout engine on transformers' ``generate``, which is slower than vLLM and runs everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    EpsilonLogitsWarper,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TypicalLogitsWarper,
)

from rlplug.errors import ConfigError, describe
from rlplug.interfaces.rollout import EngineCapabilities, Placement, PolicySpec, RolloutEngine
from rlplug.interfaces.weight_sync import Bucket, FP8Weights, SyncReport
from rlplug.observability.phase_progress import PHASE_PROGRESS
from rlplug.ops import scaled_logits
from rlplug.rollout.context_limit import max_completion_tokens
from rlplug.rollout.seeded_sampler import SeededSampler
from rlplug.token_arrays import TokenFloats, TokenIds
from rlplug.types import Completion, Request, SamplingParams
from rlplug.types.ranges import Count, check_ranges
from rlplug.weight_sync.hf_names import hf_views, sent_dtype
from rlplug.weight_sync.manifest import expected_tensors
from rlplug.weight_sync.receive_checks import WeightSyncValidator

if TYPE_CHECKING:
    from rlplug.interfaces.memory import EngineMemory, EngineMemoryRequest
    from rlplug.rollout.turns.stop_strings import StopStrings

SAMPLER_BYTES: Final = 20
"""Bytes per logit while sampling: five float32 copies (raw, tempered, probabilities, cumulative sum, masked)."""

WARPERS: Final = {"epsilon_cutoff": EpsilonLogitsWarper, "min_p": MinPLogitsWarper, "typical_p": TypicalLogitsWarper}
"""What of transformers leaves tokens out by the option's value; it gets and returns logits after the temperature."""

TRIED: Final = 300
"""Tokens of the longest prompt by which the engine tries whether others in a batch change what it generates."""

COUNT_S: Final = 0.5
"""Shortest time between two counts of what was generated, which wait for the device, in seconds."""


class HFRollout(RolloutEngine):
    """Rollout engine that generates with a copy of the policy in the trainer's process, one copy per rank.

    Each request draws from its own seed, so a completion depends neither on the other requests in its batch nor on the
    number of ranks, up to round-off. Weights that come in FP8 are dequantised, and computation stays in the policy's
    dtype.

    Args:
        max_batch_size: Most requests in one batch; more run one batch after another.
    """

    capabilities: EngineCapabilities = EngineCapabilities(
        colocated=True, fp8_refit=True, routed_experts=True, stop_strings=True
    )
    sampling_extra: ClassVar[frozenset[str]] = frozenset(WARPERS)

    @classmethod
    def preference(cls, device_type: str) -> int:
        return 1

    def __init__(self, max_batch_size: Count = 256) -> None:
        self.max_batch_size = max_batch_size
        check_ranges(self, "rollout")
        self._stopping_criteria = StoppingCriteriaList([_Stop(self)])
        self._version: int | None = None
        self._batch_by = 0  # a batch has any prompts; 1: prompts of one length; 2: one prompt
        self._num_tokens = 0
        self._seconds = 0.0

    def check_sampling(self, sampling: SamplingParams, key: str) -> None:
        super().check_sampling(sampling, key)
        for name, value in sampling.extra.items():
            try:
                WARPERS[name](value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{key}.extra.{name} is {value!r}, which transformers refuses: {error}.") from error

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        self._policy = policy
        self._device = placement.device
        config = AutoConfig.from_pretrained(policy.path, trust_remote_code=False)
        with torch.random.fork_rng(devices=[]):  # drawing initial weights must not advance the run's generator
            model: Any = AutoModelForCausalLM.from_config(config, dtype=policy.dtype, trust_remote_code=False)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(sent_dtype(name, policy.dtype))
        self._model = model.to(self._device).eval()
        self._recorder = None
        if policy.routers is not None:
            from rlplug.rollout.routed_experts import RouterRecorder

            self._recorder = RouterRecorder(self._model)
        self._stop: StopStrings | None = None
        if policy.stop:
            from rlplug.rollout.turns.stop_strings import StopStrings

            self._stop = StopStrings(AutoTokenizer.from_pretrained(policy.path, trust_remote_code=False), policy)
        # settings of a checkpoint's generation_config.json (temperature, top_k, ...) must not reach the sampler
        self._model.generation_config = GenerationConfig()

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        began = time.perf_counter()
        longest = max((request.limit(sampling) for request in requests), default=0)
        # requests that the context cuts short run apart, so that they cut short no other
        by_limit: dict[tuple[int, int], list[int]] = {}
        for index, request in enumerate(requests):
            limit = min(longest, max_completion_tokens(request, self._policy))
            by_limit.setdefault((limit, (0, len(request.prompt_ids), index)[self._batch_by]), []).append(index)
        completions: dict[int, Completion] = {}
        num_tokens = 0
        for (num_new, _), indices in by_limit.items():
            for start in range(0, len(indices), self.max_batch_size):
                chosen = indices[start : start + self.max_batch_size]
                if self.is_stopping():
                    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
                    completions |= {index: self._completion(requests[index], *nothing, None) for index in chosen}
                    continue
                counted = len(completions), num_tokens
                batch = self._generate_batch([requests[index] for index in chosen], sampling, num_new, counted)
                completions |= zip(chosen, batch, strict=True)
                num_tokens += sum(len(completion.token_ids) for completion in batch)
        self._num_tokens += num_tokens
        self._seconds += time.perf_counter() - began
        return [completions[index] for index in range(len(requests))]

    @torch.no_grad()
    def _generate_batch(
        self, requests: Sequence[Request], sampling: SamplingParams, num_new: int, counted: tuple[int, int]
    ) -> list[Completion]:
        prompt_ids, attention_mask = self._left_pad([request.prompt_ids for request in requests])
        draw = SeededSampler([request.seed for request in requests], sampling, num_new, self._device)
        sampler = _Sampler(draw, sampling)
        criteria = StoppingCriteriaList(self._stopping_criteria)
        if self._stop is not None:
            criteria.append(self._stop.criterion(prompt_ids.shape[1]))
        counter = _ProgressCounter(prompt_ids.shape[1], self._policy.eos_token_ids, *counted)
        generated: Any = self._model.generate(
            prompt_ids,
            attention_mask=attention_mask,
            logits_processor=LogitsProcessorList([counter, sampler]),
            stopping_criteria=criteria,
            generation_config=GenerationConfig(
                do_sample=False,  # the logits processor samples: it leaves one finite logit
                max_new_tokens=num_new,
                eos_token_id=list(self._policy.eos_token_ids),
                pad_token_id=self._policy.pad_token_id,
            ),
        )
        token_ids = generated[:, prompt_ids.shape[1] :].int().cpu().numpy()
        logprobs = torch.stack(sampler.logprobs, dim=1).float().cpu().numpy()
        recorded = None if self._recorder is None else self._recorder.take(len(requests)).cpu().numpy()
        completions = []
        for row, request in enumerate(requests):
            experts = None if recorded is None else recorded[row, prompt_ids.shape[1] - len(request.prompt_ids) :]
            ids = token_ids[row, : request.limit(sampling)]
            completions.append(self._completion(request, ids, logprobs[row], experts))
        return completions

    def _is_as_alone(self, *lengths: int) -> bool:
        """Return whether prompts get the same beside each other: states and positions may not know mask, or batch.

        Raises:
            ConfigError: The model does not generate.
        """
        vocabulary, most = self._model.config.get_text_config().vocab_size, self._policy.max_context - 4
        ids = torch.randint(2, vocabulary, (3, max(2, min(TRIED, most))), generator=torch.Generator().manual_seed(0))
        prompts = [Request("tried", tuple(row[:length]), 0) for row, length in zip(ids.tolist(), lengths, strict=False)]
        try:
            beside, *alone = (self._generate_batch(p, SamplingParams(4), 4, (0, 0)) for p in (prompts, *zip(prompts)))
        except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            problem = f"{type(self._model).__name__} of transformers does not generate: {describe(error).rstrip('.')}"
            raise ConfigError(f"rollout: {problem}. Use another engine.") from error
        near = 1e-4 if self._policy.dtype == torch.float32 else 0.05
        return all(
            np.array_equal(one.token_ids, two.token_ids) and float(np.abs(one.logprobs - two.logprobs).mean()) < near
            for one, (two,) in zip(beside, alone, strict=True)
        )

    def _left_pad(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return prompt ids and attention mask, int64 [B, T], padded on the left: generation appends on the right."""
        longest = max(len(prompt) for prompt in prompts)
        prompt_ids = torch.full((len(prompts), longest), self._policy.pad_token_id)
        attention_mask = torch.zeros_like(prompt_ids)
        for row, prompt in enumerate(prompts):
            prompt_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        return prompt_ids.to(self._device), attention_mask.to(self._device)

    def _completion(
        self, request: Request, token_ids: TokenIds, logprobs: TokenFloats, recorded: np.ndarray[Any, Any] | None
    ) -> Completion:
        """Return the completion without the padding that ``generate`` appends after the end token.

        ``recorded``, int16 [tokens, L, k], has the experts of the tokens that were read, from the prompt's first on.
        """
        assert self._version is not None
        ends = np.isin(token_ids, self._policy.eos_token_ids).nonzero()[0]
        length, has_ended = (int(ends[0]) + 1, True) if len(ends) else (len(token_ids), False)
        if self._stop is not None and (end := self._stop.end(request.prompt_ids[-1], token_ids[:length])):
            length, has_ended = end, True
        return Completion(
            request_id=request.request_id,
            token_ids=token_ids[:length],
            logprobs=logprobs[:length],
            finish_reason="stop" if has_ended else "abort" if self.is_stopping() else "length",
            policy_version=self._version,
            routed_experts=self._experts(len(request.prompt_ids) + length, recorded),
        )

    def _experts(self, num_tokens: int, recorded: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
        if self._policy.routers is None:
            return None
        experts = self._policy.routers.empty(num_tokens)
        if recorded is not None:
            experts[:-1] = recorded[: num_tokens - 1]
        return experts

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        own_weights = hf_views(self._model)
        validator = WeightSyncValidator(type(self).__name__, expected_tensors(self._model, self._policy))
        for bucket in validator.count(buckets):
            tensors = dict(bucket)
            for name in tensors.keys() & own_weights.keys():
                weight, scales = tensors[name], tensors.get(FP8Weights.scale_name(name))
                if scales is not None:
                    from rlplug.weight_sync.fp8_quantize import dequantize_blocks

                    weight = dequantize_blocks(weight, scales, own_weights[name].dtype)
                own_weights[name].copy_(weight)
        is_first, self._version = self._version is None, version
        if is_first:
            tried = (1, 1 + TRIED * 2 // 3, TRIED), (TRIED, TRIED)  # lengths in a batch: padding, then none
            self._batch_by = next((by for by, lengths in enumerate(tried) if self._is_as_alone(*lengths)), 2)
        return validator.report(version)

    def advice(self) -> list[str]:
        slow = "one prompt at a time is generated, as transformers mixes rows of this model: take another engine."
        return [slow] if self._batch_by == 2 else []

    def plan_memory(self, policy: PolicySpec, needs: EngineMemoryRequest) -> EngineMemory:
        """Return the bytes of its copy of the policy, and of KV cache and sampler for one batch while it generates."""
        from rlplug.interfaces.memory import EngineMemory

        num_rows, weights = min(self.max_batch_size, needs.completions), needs.parameters * policy.dtype.itemsize
        return EngineMemory(
            weights=weights,
            kv_cache=num_rows * needs.longest * needs.kv_bytes_per_token,
            other=num_rows * needs.vocab_size * SAMPLER_BYTES,
            asleep=weights,
            kv_bytes_per_token=needs.kv_bytes_per_token,
            rows=num_rows,
            keeps_cache=False,
        )

    def stats(self) -> dict[str, float]:
        stats = {"num_tokens": float(self._num_tokens), "tokens_per_s": self._num_tokens / max(self._seconds, 1e-9)}
        self._num_tokens, self._seconds = 0, 0.0
        return stats

    def close(self) -> None:
        self._model = None


class _Stop(StoppingCriteria):
    """Criterion that ends all sequences of a batch when the run is told to stop."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self._engine.is_stopping(), device=input_ids.device)


class _Sampler(LogitsProcessor):
    """Logits processor that samples each sequence's next token with its own seed, and masks all other tokens.

    What ``sampling.extra`` leaves out goes first, after the temperature; top-k and top-p count what remains, as in
    vLLM. ``logprobs[i]``, float32 [B], is that of step ``i`` under the distribution that was sampled.
    """

    def __init__(self, sample: SeededSampler, sampling: SamplingParams) -> None:
        self._sample = sample
        self._temperature = sampling.temperature
        extra = {} if sampling.is_greedy else sampling.extra
        self._warpers = [WARPERS[name](value) for name, value in extra.items()]
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for warp in self._warpers:
            left_out = warp(input_ids, scaled_logits(scores, self._temperature)).isneginf()
            scores = scores.masked_fill(left_out, -torch.inf)
        tokens, logprobs = self._sample(scores)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)


class _ProgressCounter(LogitsProcessor):
    """Logits processor that counts what a batch has generated, for the progress display; it changes no logit.

    ``num_done`` and ``num_tokens`` are completions and tokens of the batches before.
    """

    def __init__(self, prompt_length: int, eos_token_ids: Sequence[int], num_done: int, num_tokens: int) -> None:
        self._prompt_length = prompt_length
        self._eos_token_ids = eos_token_ids
        self._before = (num_done, num_tokens)
        self._next_s = time.monotonic() + COUNT_S

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if time.monotonic() >= self._next_s:
            generated = input_ids[:, self._prompt_length :]
            ends = torch.isin(generated, torch.tensor(self._eos_token_ids, device=generated.device)).cumsum(dim=1)
            num_done, num_tokens = self._before
            num_padding = (ends > 0).sum() - (ends[:, -1:] > 0).sum()  # of a completion, all after its end token
            PHASE_PROGRESS.in_call(
                num_done + int((ends[:, -1:] > 0).sum()), num_tokens + int(ends.numel() - num_padding)
            )
            self._next_s = time.monotonic() + COUNT_S
        return scores
