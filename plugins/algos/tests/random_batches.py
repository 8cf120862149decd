"""Random ragged batches for the tests of this package, full of the cases that are legal and odd."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from rlplug_devkit.padded_rows import PaddedRows
from torch import Tensor

from rlplug.interfaces import Denominators, RunInfo

SEEDS = range(60)
MAX_NEW_TOKENS = 8
"""Below the longest response that a random batch can hold, so that lengths fall on both sides of it."""
RUN = RunInfo(num_completions=16, group_size=4, max_new_tokens=MAX_NEW_TOKENS)


@dataclass(frozen=True)
class Draw:
    """A batch with everything that an algorithm may ask for, and what the models say now, as leaves with gradient."""

    batch: Any
    logprobs: Tensor
    entropy: Tensor
    values: Tensor

    @property
    def flat(self) -> Draw:
        """The same of the tokens that train alone: a ``Batch``, and leaves [K]."""
        leaves = (self.batch.trained(x.detach()).requires_grad_() for x in (self.logprobs, self.entropy, self.values))
        return Draw(self.batch.tokens, *leaves)


@functools.cache
def random_batch(seed: int, dtype: torch.dtype = torch.float64) -> Draw:
    """Rows of 1 to 5 groups in any order, groups of 1 to 6; prompts, responses and padding of random lengths.

    Some groups have equal rewards, or only failed ones; some rows have no response, one token, no trainable token at
    all, or a gap in the response (another turn); some are truncated. The numbers of both dtypes are the same.
    """
    random = numpy.random.default_rng(seed)
    groups = [number * 7 + 3 for number in range(random.integers(1, 6)) for _ in range(random.integers(1, 7))]
    groups = random.permutation(groups)
    size, width = len(groups), int(random.integers(4, 17))
    prompts = random.integers(1, min(width, 4), size)
    lengths = random.integers(prompts, width + 1)
    kinds = random.choice(["any", "empty", "one", "masked"], size, p=[0.76, 0.08, 0.08, 0.08])
    lengths = numpy.where(kinds == "empty", prompts, numpy.where(kinds == "one", prompts + 1, lengths))
    positions = numpy.arange(width)
    attention = positions < lengths[:, None]
    starts = prompts + random.integers(1, numpy.maximum(lengths - prompts, 2))
    gap = (positions >= starts[:, None]) & (positions < (starts + random.integers(1, 4, size))[:, None])
    gap &= (random.random(size) < 0.3)[:, None]
    rewards, valid = _rewards(random, groups)
    mask = attention & (positions >= prompts[:, None]) & ~gap & (kinds != "masked")[:, None] & valid[:, None]
    current = -random.exponential(size=(size, width))
    others = {
        "input_ids": random.integers(0, 9, (size, width)),
        "attention_mask": attention,
        "response_mask": mask,
        "reward_valid": valid,
        "group_index": groups,
        "truncated": random.random(size) < 0.2,
    }
    old = current + random.normal(size=current.shape) * random.choice([1e-3, 0.25])
    floats = {
        "rewards": rewards,
        "old_logprobs": old,
        "ref_logprobs": current + random.normal(size=current.shape) * 0.5,
        "rollout_logprobs": old + random.normal(size=current.shape) * 0.4,
        "values": random.normal(size=current.shape),
    }
    entropy = random.exponential(size=current.shape)
    values = floats["values"] + random.normal(size=current.shape) * 0.3

    def tensor(array: numpy.ndarray) -> Tensor:
        # through float32, so that what a float32 test sees is what its oracle sees
        return torch.from_numpy(array.astype(numpy.float32)).to(dtype)

    batch = PaddedRows(
        **{name: torch.from_numpy(value) for name, value in others.items()},
        **{name: tensor(value) for name, value in floats.items()},
    )
    return Draw(batch, *(tensor(x).requires_grad_() for x in (current, entropy, values)))


def _rewards(random: numpy.random.Generator, groups: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    rewards, valid = numpy.zeros(len(groups)), random.random(len(groups)) < 0.85
    everything_failed = random.random() < 0.03
    for group in sorted(set(groups.tolist())):
        rows = groups == group
        kind = random.choice(["binary", "real", "equal", "failed"], p=[0.4, 0.35, 0.15, 0.1])
        drawn = {
            "binary": random.integers(0, 2, rows.sum()),
            "real": random.normal(size=rows.sum()) * 3,
        }
        rewards[rows] = drawn.get(kind, 0.1)
        if kind == "failed" or everything_failed:
            valid[rows] = False
    return numpy.where(valid, rewards, 0.0), valid


def denominators_of(batch: PaddedRows) -> Denominators:
    """What the loop would count if the batch were the mini-batch."""
    tokens = batch.response_mask.sum(dim=1)
    return Denominators(int(tokens.sum()), int((tokens > 0).sum()))


def with_garbage(tensor: Tensor, mask: Tensor) -> Tensor:
    """NaN and infinities where ``mask`` is false; a new leaf if ``tensor`` has a gradient."""
    garbage = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30], dtype=tensor.dtype)
    filler = garbage[torch.arange(mask.numel()) % 4].reshape(mask.shape)
    return torch.where(mask, tensor.detach(), filler).requires_grad_(tensor.requires_grad)


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def assert_agrees(actual: object, expected: object, dtype: torch.dtype, what: str, at_least: float = 1e-2) -> None:
    """Differences are to be within the dtype's tolerance of the largest magnitude, or of ``at_least`` if that is more.

    ``at_least`` is the size of the terms that a sum may cancel out of; NaN agrees with nothing.
    """
    if isinstance(actual, Tensor):
        assert actual.dtype == dtype, f"{what}: {actual.dtype} from inputs of {dtype}"
        actual = actual.detach().numpy()
    actual, expected = numpy.asarray(actual, numpy.float64), numpy.asarray(expected, numpy.float64)
    assert actual.shape == expected.shape, what
    if actual.size:
        difference = numpy.abs(actual - expected).max()
        allowed = TOLERANCE[dtype] * max(numpy.abs(expected).max(), at_least)
        assert difference <= allowed, f"{what}\n{actual}\n{expected}"
