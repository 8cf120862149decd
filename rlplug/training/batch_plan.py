"""The batch plan: global algorithmic sizes, resolved per rank, checked, and cut into micro-batches.

``prompts_per_step``, ``group_size`` and ``mini_batch_size`` are global: they mean the same on 1 GPU and on 64.
Sizes ``_per_gpu`` only change speed and memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import torch

from rlplug.errors import ConfigError
from rlplug.training.seqlen_balancing import schedule
from rlplug.types.ranges import Count, Epochs, Range, Tokens, check_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rlplug.training.row_layout import RowLayout

    Bundle: TypeAlias = tuple[tuple[int, ...], int, float]
    """Rows that one pass computes together, its tokens and its pairs of tokens."""

PassKind = Literal["update", "forward", "critic_update", "critic_forward"]
"""``update``: forward and backward passes. ``forward``: nothing is trained. ``critic_``: of a critic's own trunk."""

SMALLEST_DEFAULT_BUDGET = 16384
KINDS: tuple[PassKind, ...] = ("update", "forward", "critic_update", "critic_forward")
TOKEN_BUDGETS = tuple(f"model.{of}.max_tokens_per_gpu{kind}" for of in ("batch", "critic") for kind in ("", "_forward"))
ROWS = "model.batch.micro_batch_size_per_gpu"

_schedule = functools.lru_cache(maxsize=2)(schedule)
"""A step's passes over policy, reference and critic cut the same rows, each with its own call."""


@dataclass
class BatchSizes:
    """The sizes that a user sets.

    Args:
        prompts_per_step: Prompts of one RL step, over all ranks.
        group_size: Completions per prompt.
        mini_batch_size: Completions per optimizer step, over all ranks. By default all of a step's: one update per
            rollout, exactly on-policy.
        num_epochs: Passes over a step's completions.
        micro_batch_size_per_gpu: Completions per pass of one rank (of the ranks that share sequences, where they do),
            in place of the token budgets.
        micro_batch_size_per_gpu_forward: The same when nothing is trained; by default ``micro_batch_size_per_gpu``.
        max_tokens_per_gpu: Tokens per forward and backward pass of one rank. By default 16384, or twice a rank's part
            of the longest possible sequence where that is more.
        max_tokens_per_gpu_forward: Tokens per pass of one rank when nothing is trained: old_logprobs, ref_logprobs and
            values. By default twice ``max_tokens_per_gpu``.
        share_prefixes: Compute a prompt once for all of its completions, where a plugin can.
    """

    prompts_per_step: Count = 32
    group_size: Annotated[int, Range(1, 100_000)] = 8
    mini_batch_size: Annotated[int, Range(1, 100_000_000)] | None = None
    num_epochs: Epochs = 1
    micro_batch_size_per_gpu: Count | None = None
    micro_batch_size_per_gpu_forward: Count | None = None
    max_tokens_per_gpu: Tokens | None = None
    max_tokens_per_gpu_forward: Tokens | None = None
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, "model.batch")


@dataclass(frozen=True)
class MicroBatch:
    """Rows of the step's batch for one pass of one rank."""

    indices: tuple[int, ...]
    is_filler: bool = False
    """Whether the rank has no rows left: it repeats one with weight zero, because all ranks run as many passes."""


class BatchPlan:
    """Resolved sizes for ``world_size`` ranks.

    Args:
        sizes: Sizes that the user set.
        world_size: Ranks of the run, each with an engine that generates its share of the prompts.
        data_size: Ranks, or groups of ranks, that hold different rows in a pass; all by default.
        sequence_size: Ranks that share the tokens of each row, and with them the token budgets.
        longest: Tokens of the longest possible prompt and completion; token budgets must hold it.
        quadratic_cost: A sequence of n tokens is taken to cost ``n + quadratic_cost * n**2``; see
            :func:`rlplug.models.shape.attention_cost`.
        layout: Computes tokens that rows share once; by default each row has its own.
        critic_tokens: Token budgets of a critic's updates and forward-only passes; by default the policy's, or twice.

    Raises:
        ConfigError: A size does not divide as it must, or is too small; the message names values that work.
    """

    def __init__(
        self,
        sizes: BatchSizes,
        world_size: int,
        data_size: int | None = None,
        sequence_size: int = 1,
        longest: int | None = None,
        quadratic_cost: float = 0.0,
        layout: RowLayout | None = None,
        critic_tokens: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self.world_size = world_size
        self.data_size = world_size if data_size is None else data_size
        self.sequence_size = sequence_size
        self.quadratic_cost = quadratic_cost
        self.layout = layout
        self.prompts_per_step = sizes.prompts_per_step
        self.group_size = sizes.group_size
        self.num_epochs = sizes.num_epochs
        self.num_completions = sizes.prompts_per_step * sizes.group_size
        self.mini_batch_size = self.num_completions if sizes.mini_batch_size is None else sizes.mini_batch_size
        given = (sizes.max_tokens_per_gpu, sizes.max_tokens_per_gpu_forward, *critic_tokens)
        self._check(sizes, given)
        self.num_mini_batches = self.num_completions // self.mini_batch_size
        self.max_tokens: dict[PassKind, int] = {}
        """Token budget of one rank's pass of each kind; empty where ``max_rows`` decides."""
        self.max_rows: dict[PassKind, int] = {}
        """Completions of one rank's pass of each kind; empty where tokens decide."""
        self.has_critic_budget = any(critic_tokens)
        if rows := sizes.micro_batch_size_per_gpu:
            self.max_rows = dict(zip(KINDS, 2 * (rows, sizes.micro_batch_size_per_gpu_forward or rows), strict=True))
        else:
            update = given[0] or default_budget(longest or 0, sequence_size)
            forward = given[1] or 2 * update
            own = given[3] or (2 * given[2] if given[2] else forward)
            self.max_tokens = dict(zip(KINDS, (update, forward, given[2] or update, own), strict=True))
            self._check_longest(longest or 0)

    def _check(self, sizes: BatchSizes, budgets: tuple[int | None, ...]) -> None:
        if sizes.prompts_per_step % self.world_size:
            divide = range(self.world_size, sizes.prompts_per_step + self.world_size, self.world_size)
            nearest = _nearest(sizes.prompts_per_step, divide)
            raise ConfigError(
                f"model.batch.prompts_per_step is {sizes.prompts_per_step}, which does not divide over "
                f"{self.world_size} ranks. Nearest that do: {nearest}."
            )
        valid = [size for size in range(self.data_size, self.num_completions + 1) if self.num_completions % size == 0]
        if self.mini_batch_size not in valid:
            raise ConfigError(
                f"model.batch.mini_batch_size is {self.mini_batch_size}: it must divide the {self.num_completions} "
                f"completions of a step (prompts_per_step {sizes.prompts_per_step} x group_size {sizes.group_size}) "
                f"and be at least {self.data_size}, one a rank. "
                f"Nearest that do: {_nearest(self.mini_batch_size, valid)}."
            )
        for key, value in zip(TOKEN_BUDGETS, budgets, strict=True):
            if sizes.micro_batch_size_per_gpu is not None and value is not None:
                raise ConfigError(f"{ROWS} and {key} are both set: keep one.")
        if sizes.micro_batch_size_per_gpu is None and sizes.micro_batch_size_per_gpu_forward is not None:
            raise ConfigError(f"{ROWS}_forward is set, and {ROWS} is not: set both.")

    def _check_longest(self, longest: int) -> None:
        """Refuse a token budget that the longest possible sequence would not fit."""
        least = -(-longest // self.sequence_size)
        for key, budget in zip(TOKEN_BUDGETS, self.max_tokens.values(), strict=True):
            if budget < least:
                sharing = f", shared by {self.sequence_size} ranks" if self.sequence_size > 1 else ""
                raise ConfigError(
                    f"{key} is {budget}, and one sequence can have {longest} tokens{sharing} (longest prompt and "
                    f"sampling.max_new_tokens): give at least {least}, twice that is usual."
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

    def passes(
        self, rows: Sequence[int], lengths: Sequence[int], phase: PassKind = "update", table: NDArray[Any] | None = None
    ) -> list[list[MicroBatch]]:
        """Return the passes of each of ``data_size`` ranks over ``rows``: as many for each, most tokens first.

        All ranks compute the same partition of the rows, which balances what a pass costs each of them and what all
        passes together do.

        Args:
            rows: Rows of the step; the same on every rank.
            lengths: Tokens of every row of the step.
            phase: Phase whose token budget applies.
            table: What is known of every row of the step, for the layout.
        """
        limit = self.max_rows.get(phase) or self.max_tokens[phase] * self.sequence_size
        bundles, parts_of = self._shortest(self._ways(rows, lengths, limit, table), limit)
        # what does not fit in memory fails at once, and later passes fit into the blocks that the allocator has by then
        parts_of.sort(key=lambda parts: max(sum(bundles[i][1] for i in part) for part in parts), reverse=True)
        filler = MicroBatch((min(rows, key=lengths.__getitem__),), is_filler=True)
        return [
            [
                MicroBatch(tuple(row for i in parts[rank] for row in bundles[i][0])) if parts[rank] else filler
                for parts in parts_of
            ]
            for rank in range(self.data_size)
        ]

    def _ways(
        self, rows: Sequence[int], lengths: Sequence[int], limit: int, table: NDArray[Any] | None
    ) -> Sequence[Sequence[Bundle]]:
        """Return ways to cut rows into what one pass computes together: each row alone, or as the layout shares."""
        if self.layout is None or table is None:
            return [[((row,), lengths[row], lengths[row] ** 2) for row in rows]]
        limits = (math.inf, limit) if self.max_rows else (limit, math.inf)
        ways = self.layout.bundles(table, rows, *limits)
        return [next(ways)] if self.data_size == 1 else list(ways)  # one rank does not wait

    def _shortest(self, ways: Sequence[Sequence[Bundle]], limit: int) -> tuple[Sequence[Bundle], list[list[list[int]]]]:
        """Return the way whose passes cost least, and the parts of its passes, one a rank."""
        found = []
        for bundles in ways:
            weights = tuple(len(rows) if self.max_rows else tokens for rows, tokens, _ in bundles)
            costs = tuple(tokens + self.quadratic_cost * pairs for _, tokens, pairs in bundles)
            passes = _schedule(costs, weights, self.data_size, limit)
            slowest = (max(sum(costs[i] for i in part) for part in parts) for parts in passes)
            found.append((sum(slowest) if len(ways) > 1 else 0.0, bundles, list(passes)))
        return min(found, key=lambda each: each[0])[1:]

    def table_rows(self, on_policy_pass: str | None = None) -> list[tuple[str, str, str]]:
        """Return name, value and meaning of each resolved size, for the table that a run prints.

        Args:
            on_policy_pass: Why the policy runs once before the update even when that is exactly on-policy.
        """
        why = on_policy_pass if self.is_on_policy else "several optimizer steps per rollout"
        old_logprobs = ("skipped", "exactly on-policy: the current logprobs") if why is None else ("computed", why)
        updates = self.num_mini_batches
        table = [
            ("data-parallel ranks", str(self.data_size), "train on different completions"),
            ("sequence ranks", str(self.sequence_size), "share the tokens of a completion"),
            ("prompts a step", str(self.prompts_per_step), f"{self.prompts_per_step // self.world_size} an engine"),
            ("completions a step", str(self.num_completions), f"groups of {self.group_size}"),
            ("mini-batch", str(self.mini_batch_size), "completions, over all ranks"),
            ("optimizer steps", f"{self.updates_per_step} a step", f"{self.num_epochs} epoch(s) x {updates}"),
            ("update pass", self._per_pass("update"), "at most, forward and backward of a rank"),
            ("forward-only pass", self._per_pass("forward"), "at most, where nothing is trained"),
            ("old_logprobs", *old_logprobs),
        ]
        if self.layout is not None:
            table.append(("shared prefixes", "computed once", self.layout.describe()))
        return [row for row in table if row[0] != "sequence ranks" or self.sequence_size > 1]

    def _per_pass(self, phase: PassKind) -> str:
        return f"{self.max_rows[phase]} completions" if self.max_rows else f"{self.max_tokens[phase]:,} tokens"


def default_budget(longest: int, sequence_size: int) -> int:
    """Return twice a rank's part of the longest sequence, so that passes can be filled evenly."""
    return -(-max(SMALLEST_DEFAULT_BUDGET * sequence_size, 2 * longest) // (1024 * sequence_size)) * 1024


def _nearest(value: int, valid: Sequence[int]) -> str:
    nearest = [size for size in valid if size < value][-1:] + [size for size in valid if size > value][:1]
    return " and ".join(map(str, nearest))
