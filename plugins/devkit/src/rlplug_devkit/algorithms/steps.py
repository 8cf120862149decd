"""Steps that the checks of algorithms compute: completions with rewards and logprobs, and ranks that share a step."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug.interfaces.algorithm import Needs
from rlplug.types import ONE_RANK, Prompt, RewardError, Sample, Segment, StepBatch, StepStatistics

NUM_GROUPS: Final = 6
NUM_WITH_ONE_RIGHT: Final = 4
"""Groups of :func:`contrasting_rows` of which one completion is right; in as many others one is wrong."""
MEETING_TIMEOUT_S: Final = 10.0
KINDS: Final = ("binary", "real", "equal", "binary", "one failed", "all failed")
"""Rewards of each group."""
ENTROPIES: Final = (1.0, *[0.05] * 6, 3.0)
"""Mean entropies of a token in steps that follow each other, in nats: a coefficient follows them up and down."""
Floats = NDArray[np.float32]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """A completion, and what the models say of its tokens: float32 [n], of which those that do not train are 0."""

    sample: Sample
    logprobs: Floats
    """Of the policy that learns."""
    old_logprobs: Floats
    ref_logprobs: Floats
    values: Floats
    entropy: Floats
    new_values: Floats | None = None
    """Of the critic that learns; 0.1 above ``values`` where it is ``None``."""

    def with_reward(self, reward: float) -> Row:
        """Return the completion with another reward; one whose reward failed keeps its error."""
        return dataclasses.replace(self, sample=dataclasses.replace(self.sample, reward=reward))


def make_rows(seed: int, group_size: int, max_new_tokens: int) -> list[Row]:
    """Return the completions of a step, by ascending group.

    Rewards are those of ``KINDS``. Completions have 1 to ``max_new_tokens`` tokens; one has none at all, and some have
    tokens of an environment within. The policy has moved by some 0.2 nats a token since the rollout. Entropies are
    those of ``ENTROPIES``.
    """
    random, entropy = np.random.default_rng(seed), ENTROPIES[seed % len(ENTROPIES)]
    rows = []
    for group, kind in enumerate(KINDS):
        rewards: NDArray[Any] = random.normal(size=group_size) if kind == "real" else np.arange(group_size) % 2
        if kind == "equal":
            rewards = np.full(group_size, 0.1)
        for index, reward in enumerate(rewards):
            is_failed = kind == "all failed" or (kind == "one failed" and index == 1)
            num_new = 0 if (group, index) == (0, 2) else int(random.integers(1, max_new_tokens + 1))
            row = make_row(random, group, num_new, float(reward), is_failed)
            rows.append(dataclasses.replace(row, entropy=np.float32(entropy) * row.entropy))
    return rows


def uneven(rows: Sequence[Row]) -> list[Row]:
    """Return rows of a step whose even groups have lost two completions: of four, none is alone in its group."""
    lost = {0: 2, 2: 2, 4: 2}  # NUM_GROUPS in all, so that rows still divide by groups
    counted: dict[int, int] = {}
    kept = []
    for row in rows:
        counted[row.sample.group] = counted.get(row.sample.group, 0) + 1
        if counted[row.sample.group] > lost.get(row.sample.group, 0):
            kept.append(row)
    return kept


def contrasting_rows(seed: int, group_size: int) -> list[Row]:
    """Return completions of four tokens: in some groups one is right, in as many one is wrong, see :func:`is_alone`."""
    random = np.random.default_rng(seed)
    return [
        make_row(random, group, 4, float((index == group % group_size) == (group < NUM_WITH_ONE_RIGHT)), noise=0.0)
        for group in range(2 * NUM_WITH_ONE_RIGHT)
        for index in range(group_size)
    ]


def is_alone(rows: Sequence[Row], reward: float) -> Tensor:
    """Return for each row whether it has a reward that no other of its group has: a median as baseline sees it."""
    having = Counter((row.sample.group, row.sample.reward) for row in rows)
    return torch.tensor(
        [row.sample.reward == reward and having[row.sample.group, row.sample.reward] == 1 for row in rows]
    )


def make_row(
    random: np.random.Generator, group: int, num_new: int, reward: float, is_failed: bool = False, noise: float = 0.2
) -> Row:
    """Return a completion of ``num_new`` tokens; the policy has moved by ``noise`` nats a token since the rollout."""
    num_prompt = int(random.integers(1, 4))
    size, version = num_prompt + num_new, (group + num_new) % 3
    tokens = random.integers(1, 9, size).astype(np.int32)
    mask = np.arange(size) >= num_prompt
    if num_new > 4 and random.random() < 0.5:
        mask[num_prompt + 2 : num_prompt + 4] = False  # an environment's

    def drawn(values: NDArray[Any]) -> Floats:
        return np.where(mask, values, 0.0).astype(np.float32)

    old = -random.exponential(size=size)
    rewards: dict[str, float | RewardError] = {"made": RewardError("it failed") if is_failed else reward}
    sample = Sample(
        prompt=Prompt(f"prompt-{group}", tuple(tokens[:num_prompt].tolist()), "?", "4"),
        group=group,
        token_ids=tokens,
        response_mask=mask,
        rollout_logprobs=drawn(old + random.normal(size=size) * 0.01),
        completion="x" * num_new,
        finish_reason="length" if random.random() < 0.2 else "stop",
        policy_version=version,
        segments=_segments(num_prompt, size, version),
        rewards=rewards,
        reward=reward,
    )
    return Row(
        sample,
        logprobs=drawn(old + random.normal(size=size) * noise),
        old_logprobs=drawn(old),
        ref_logprobs=drawn(old + random.normal(size=size) * noise),
        values=drawn(random.normal(size=size) if noise else np.zeros(size)),
        entropy=drawn(random.exponential(size=size)),
    )


def _segments(start: int, end: int, version: int) -> tuple[Segment, ...]:
    """Return the segments of a completion whose second half a later policy wrote, as in a partial rollout."""
    middle = (start + end) // 2
    parts = [(start, middle, version), (middle, end, version + 1)] if middle > start else [(start, end, version)]
    return tuple(Segment(*part, ends_turn=part[1] == end) for part in parts)


def batch_of(rows: Sequence[Row], needs: Needs | None = None, step: StepStatistics = ONE_RANK) -> StepBatch:
    """Return completions as an algorithm's ``advantages`` gets them.

    Args:
        rows: Completions by ascending group, possibly none.
        needs: What the algorithm declares: nothing else is there. ``None`` for everything.
        step: Sums over ranks.
    """
    batch = StepBatch.from_samples([row.sample for row in rows], step)
    named = {
        "old_logprobs": needs is None or needs.old_logprobs,
        "ref_logprobs": needs is None or needs.reference_policy,
        "values": needs is None or needs.critic,
    }
    batch = batch.with_tokens(**{name: end_to_end(rows, name) for name, is_there in named.items() if is_there})
    if needs is not None and not needs.rollout_logprobs:  # an engine need not return them
        batch = batch.with_tokens(rollout_logprobs=torch.full_like(end_to_end(rows, "logprobs"), torch.nan))
    return batch


def end_to_end(rows: Sequence[Row], name: str) -> Tensor:
    """Return a field of all rows joined, float32 [N]."""
    return torch.from_numpy(np.concatenate([np.empty(0, np.float32), *(getattr(row, name) for row in rows)]))


# ---- ranks --------------------------------------------------------------------------------------------------------


class Meeting:
    """Where the threads of ``size`` ranks bring tensors; none goes on before all are there."""

    def __init__(self, size: int) -> None:
        self._brought: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=MEETING_TIMEOUT_S)

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, ...]."""
        self._brought[rank] = tensor
        self.barrier.wait()
        found = list(self._brought)
        self.barrier.wait()
        return torch.stack(found)


@dataclass(frozen=True)
class ThreadStatistics(StepStatistics):
    """Statistics of a step whose ranks are threads of this process."""

    meeting: Meeting = dataclasses.field(default_factory=lambda: Meeting(1))
    rank: int = 0

    def gather(self, values: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, values.detach().to(torch.float64))


def on_ranks(call: Callable[[int, StepStatistics], Result], size: int) -> list[Result]:
    """Call a function on each of ``size`` ranks at once, given the rank and its statistics, and return the results.

    Raises:
        threading.BrokenBarrierError: Ranks called different methods of the statistics.
    """
    meeting = Meeting(size)

    def rank_call(rank: int) -> Result:
        try:
            result = call(rank, ThreadStatistics(size, "cpu", meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise
        return result

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_call, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception())]
        own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (own or errors)[0]
        return [future.result() for future in futures]


def shares_of(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Return the rows of each of ``size`` ranks: whole groups, and none for the last rank."""
    return [[row for row in rows if row.sample.group % (size - 1) == rank] for rank in range(size - 1)] + [[]]
