"""The batch plan: global algorithmic sizes, resolved per rank, checked, and cut into micro-batches.

``prompts_per_step``, ``group_size`` and ``mini_batch_size`` are global: they mean the same on 1 GPU and on 64.
``micro_batch_size_per_gpu`` and ``max_tokens_per_gpu`` only change speed and memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from rlplug.errors import ConfigError

Item = TypeVar("Item")


@dataclass
class BatchSizes:
    """The sizes that a user sets.

    Args:
        prompts_per_step: Prompts of one RL step, over all ranks.
        group_size: Completions per prompt.
        mini_batch_size: Completions per optimizer step, over all ranks. By default all of a step's: one update per
            rollout, exactly on-policy.
        num_epochs: Passes over a step's completions.
        micro_batch_size_per_gpu: Completions per forward and backward pass on one rank.
        max_tokens_per_gpu: Instead: tokens (padding included) per forward and backward pass on one rank. The plan
            then sorts completions by length, so that little is padding.
    """

    prompts_per_step: int = 32
    group_size: int = 8
    mini_batch_size: int | None = None
    num_epochs: int = 1
    micro_batch_size_per_gpu: int | None = None
    max_tokens_per_gpu: int | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the step's batch for one forward and backward pass of one rank."""

    indices: tuple[int, ...]
    is_filler: bool = False
    """Has no rows of its own: repeats one without weight, because every rank must run the same number of passes."""


class BatchPlan:
    """Resolved sizes for ``world_size`` ranks.

    Raises:
        ConfigError: A size does not divide as it must; the message names the nearest values that do.
    """

    def __init__(self, sizes: BatchSizes, world_size: int) -> None:
        self.world_size = world_size
        self.prompts_per_step = sizes.prompts_per_step
        self.group_size = sizes.group_size
        self.num_epochs = sizes.num_epochs
        self.num_completions = sizes.prompts_per_step * sizes.group_size
        self.mini_batch_size = self.num_completions if sizes.mini_batch_size is None else sizes.mini_batch_size
        self.micro_batch_size = sizes.micro_batch_size_per_gpu
        self.max_tokens = sizes.max_tokens_per_gpu
        self._check(sizes)
        self.num_mini_batches = self.num_completions // self.mini_batch_size

    def _check(self, sizes: BatchSizes) -> None:
        for name, value in vars(sizes).items():
            if value is not None and value < 1:
                raise ConfigError(f"model.batch.{name} is {value}: give at least 1.")
        if sizes.prompts_per_step % self.world_size:
            below = sizes.prompts_per_step // self.world_size * self.world_size
            nearest = _nearest(sizes.prompts_per_step, [size for size in (below, below + self.world_size) if size])
            raise ConfigError(
                f"model.batch.prompts_per_step is {sizes.prompts_per_step}, which does not divide over "
                f"{self.world_size} ranks. Nearest that do: {nearest}."
            )
        valid = [
            size
            for size in range(self.world_size, self.num_completions + 1, self.world_size)
            if self.num_completions % size == 0
        ]
        if self.mini_batch_size not in valid:
            raise ConfigError(
                f"model.batch.mini_batch_size is {self.mini_batch_size}: it must divide the {self.num_completions} "
                f"completions of a step (prompts_per_step {sizes.prompts_per_step} x group_size {sizes.group_size}) "
                f"and divide over {self.world_size} ranks. Nearest that do: {_nearest(self.mini_batch_size, valid)}."
            )
        if self.micro_batch_size is not None and self.max_tokens is not None:
            raise ConfigError(
                "model.batch.micro_batch_size_per_gpu and model.batch.max_tokens_per_gpu are both set: keep one."
            )

    def check_longest(self, num_tokens: int) -> None:
        """Refuse a token budget that the longest possible sequence, of ``num_tokens``, would not fit."""
        if self.max_tokens is not None and self.max_tokens < num_tokens:
            raise ConfigError(
                f"model.batch.max_tokens_per_gpu is {self.max_tokens}, and one sequence can have {num_tokens} tokens "
                f"(longest prompt and sampling.max_new_tokens): give at least {num_tokens}, twice that is usual."
            )

    @property
    def updates_per_step(self) -> int:
        return self.num_epochs * self.num_mini_batches

    @property
    def is_on_policy(self) -> bool:
        """One optimizer step per rollout: the policy that is updated is the one that sampled."""
        return self.updates_per_step == 1

    def mini_batches(self, num_completions: int, epoch: int, seed: int) -> list[list[int]]:
        """Cut the rows of a step into mini-batches, the same on every rank.

        The first epoch keeps the order in which prompts were drawn, which is random already; later epochs shuffle.
        """
        order = list(range(num_completions))
        if epoch:
            generator = torch.Generator().manual_seed(seed * 1009 + epoch)
            order = torch.randperm(num_completions, generator=generator).tolist()
        bounds = [round(num_completions * i / self.num_mini_batches) for i in range(self.num_mini_batches + 1)]
        return [order[start:end] for start, end in itertools.pairwise(bounds) if end > start]

    def micro_batches(self, rows: Sequence[int], lengths: Sequence[int], rank: int) -> list[MicroBatch]:
        """Return the passes of ``rank`` over ``rows``; every rank gets the same number.

        Args:
            rows: Of the step's batch; the same on every rank.
            lengths: Tokens of every row of the step's batch.
        """
        shares = [list(rank_share(rows, r, self.world_size)) for r in range(self.world_size)]
        cuts = [self._cut(share, lengths) for share in shares]
        num_passes = max(len(cut) for cut in cuts)
        mine = [MicroBatch(tuple(indices)) for indices in cuts[rank]]
        filler = MicroBatch((min(rows, key=lambda row: lengths[row]),), is_filler=True)
        return mine + [filler] * (num_passes - len(mine))

    def _cut(self, rows: list[int], lengths: Sequence[int]) -> list[list[int]]:
        if self.max_tokens is None:
            size = self.micro_batch_size or len(rows) or 1
            return [rows[start : start + size] for start in range(0, len(rows), size)]
        cut: list[list[int]] = []
        for row in sorted(rows, key=lambda row: lengths[row], reverse=True):
            # rows come longest first, so the first row of a micro-batch sets its padded width
            if cut and lengths[cut[-1][0]] * (len(cut[-1]) + 1) <= self.max_tokens:
                cut[-1].append(row)
            else:
                cut.append([row])
        return cut

    def rows(self, on_policy_pass: str | None = None) -> list[tuple[str, str, str]]:
        """Return name, value and meaning of each resolved size, for the table that a run prints.

        Args:
            on_policy_pass: Why the policy runs once before the update even when that is exactly on-policy.
        """
        per_pass = (
            f"{self.max_tokens} tokens"
            if self.max_tokens is not None
            else f"{self.micro_batch_size or self.mini_batch_size // self.world_size} completions"
        )
        old_logprobs = ("skipped", "exactly on-policy: the current logprobs")
        if not self.is_on_policy:
            old_logprobs = ("computed", "several optimizer steps per rollout")
        elif on_policy_pass is not None:
            old_logprobs = ("computed", on_policy_pass)
        return [
            ("ranks", str(self.world_size), "data-parallel processes"),
            ("prompts a step", str(self.prompts_per_step), f"{self.prompts_per_step // self.world_size} a rank"),
            ("completions a step", str(self.num_completions), f"groups of {self.group_size}"),
            ("mini-batch", str(self.mini_batch_size), f"{self.mini_batch_size // self.world_size} a rank"),
            (
                "optimizer steps",
                f"{self.updates_per_step} a step",
                f"{self.num_epochs} epoch(s) x {self.num_mini_batches}",
            ),
            ("micro-batch", per_pass, "per forward and backward pass of a rank"),
            ("old_logprobs", *old_logprobs),
        ]


def rank_share(items: Sequence[Item], rank: int, world_size: int) -> Sequence[Item]:
    """Return the contiguous share of ``rank`` in a list that every rank holds; shares differ by one item at most."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def _nearest(value: int, valid: Sequence[int]) -> str:
    below = [size for size in valid if size < value][-1:]
    above = [size for size in valid if size > value][:1]
    return " and ".join(str(size) for size in below + above)
