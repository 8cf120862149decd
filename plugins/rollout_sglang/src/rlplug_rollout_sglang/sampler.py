"""How SGLang draws tokens for rlplug: by each request's seed, with the logprobs of what it drew from.

SGLang's own samplers do neither (``docs/rollout-engines.md``). SGLang finds :func:`register` through the entry point
``sglang.srt.plugins``, in each of its processes; it does something in those alone whose environment has :data:`FLAG`.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch
from torch import Tensor

FLAG: Final = "RLPLUG_SGLANG_SAMPLER"
"""Variable of the environment that turns the backend on, where it is ``1``."""

BATCHES: Final = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
"""What of SGLang gathers the sampling parameters of a batch."""

BLOCK: Final = 512
"""Tokens whose probabilities are added up first, so that only few sums are wanted in float64."""

ODD: Final = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""The constants of splitmix64, as signed numbers."""


def register() -> None:
    """Add the sampling backend ``rlplug``, and have batches carry the seeds of their requests."""
    if os.environ.get(FLAG) != "1":
        return
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_sampler_backend("rlplug", _make_sampler)
    HookRegistry.register(BATCHES, _add_seeds, HookType.AFTER)


def _add_seeds(info: Any, _: type, batch: Any, *__: Any, **___: Any) -> None:
    """Do what SGLang does only for batch-invariant kernels; filtering and merging batches takes seeds along."""
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, pin_memory=True).to(batch.device, non_blocking=True)


def _make_sampler() -> Any:
    from sglang.srt.layers.sampler import Sampler

    class SeededSampler(Sampler):  # type: ignore[misc]
        def forward(
            self,
            logits_output: Any,
            sampling_info: Any,
            return_logprob: bool,
            top_logprobs_nums: Any,
            token_ids_logprobs: Any,
            positions: Tensor,
            **_: Any,
        ) -> Tensor:
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            how = (sampling_info.temperatures.view(-1), sampling_info.top_ks, sampling_info.top_ps)
            truncates = sampling_info.need_top_k_sampling or sampling_info.need_top_p_sampling
            min_ps = sampling_info.min_ps if sampling_info.need_min_p_sampling else None
            seeds, all_greedy = sampling_info.sampling_seed, sampling_info.is_all_greedy
            token_ids, logprobs = draw(
                logits, *how, seeds, positions, truncates=truncates, all_greedy=all_greedy, min_ps=min_ps
            )
            if return_logprob:
                logits_output.next_token_logprobs = logprobs
            self._sync_token_ids_across_tp(token_ids, sampling_info)
            return token_ids

    return SeededSampler()


def draw(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor | None,
    positions: Tensor,
    truncates: bool = True,
    all_greedy: bool = False,
    min_ps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token of each row.

    Args:
        logits: [B, V].
        temperatures: float32 [B]; SGLang has 1 for greedy.
        top_ks: int [B]; 1 means greedy, and large values keep all tokens.
        top_ps: float32 [B].
        seeds: int64 [B]; ``None`` in batches that warm an engine up.
        positions: int64 [B]: of the last token before the drawn one.
        truncates: Whether some row excludes tokens, without a look at the device.
        all_greedy: Whether all rows are greedy, likewise.
        min_ps: float32 [B]; excludes, after the others, tokens below this share of the likeliest one's probability;
            ``None`` where no row has it.

    Returns:
        Tokens, int32 [B], and the logprobs under what they were drawn from, float32 [B]; for greedy, untempered.
    """
    scaled = logits.float() / temperatures[:, None]
    best = scaled.argmax(dim=-1)
    if all_greedy:
        chosen = scaled.gather(1, best[:, None]).squeeze(1)
        return best.to(torch.int32), chosen - scaled.logsumexp(dim=-1)
    probabilities = torch.softmax(scaled, dim=-1)
    greedy = top_ks <= 1
    if truncates:
        kept = truncated(probabilities, top_ks, top_ps)
        probabilities = torch.where(greedy[:, None], probabilities, kept)
    if min_ps is not None:
        least = min_ps[:, None] * probabilities.amax(dim=-1, keepdim=True)
        kept = torch.where(probabilities < least, 0.0, probabilities)
        stays = greedy | (min_ps <= 0)
        probabilities = torch.where(stays[:, None], probabilities, kept / kept.sum(dim=-1, keepdim=True))
    shares = uniform(torch.zeros_like(positions) if seeds is None else seeds, positions)
    token_ids = torch.where(greedy, best, _at_share(probabilities, shares))
    return token_ids.to(torch.int32), probabilities.gather(1, token_ids[:, None]).squeeze(1).log()


def truncated(probabilities: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Return what top-k keeps, and of that what top-p keeps, [B, V]; the likeliest token always stays."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = torch.where(ranks < top_ks[:, None], ordered, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    # rounding must not exclude a token where top-p keeps all
    ordered = torch.where((before < top_ps[:, None]) | (top_ps[:, None] >= 1), ordered, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


def _at_share(probabilities: Tensor, shares: Tensor) -> Tensor:
    """Return the first token of each row up to which the probabilities add up to more than a share of their sum."""
    spare = -probabilities.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(probabilities, (0, spare))
    blocks = padded.view(padded.shape[0], -1, BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    targets = shares[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, targets, right=True).clamp(max=ends.shape[-1] - 1)
    starts = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    # the two ways to add up differ in their last bits
    rest = torch.minimum(targets - starts, torch.nextafter(inside[:, -1:], inside.new_zeros(())))
    token_ids = (block * BLOCK + torch.searchsorted(inside, rest, right=True)).squeeze(1)
    return token_ids.clamp(max=probabilities.shape[-1] - 1)  # NaN must not become an index of nothing


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) for each seed and position, float64 [B]; the same on every device and in any batch."""
    mixed = _mixed(_mixed(seeds.long() + ODD[0]) + positions.long() * ODD[0])
    return _shifted(mixed, 16).double() / 2.0**48


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers: splitmix64, whose products wrap around."""
    x = (x ^ _shifted(x, 30)) * ODD[1]
    x = (x ^ _shifted(x, 27)) * ODD[2]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
