"""The rows of a step over all ranks: their order, who has them, and how they come to the ranks that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.errors import RunError
from rlplug.interfaces.algorithm import Denominators
from rlplug.training.batch_plan import MicroBatch
from rlplug.types import NOT_RECORDED, StepBatch

if TYPE_CHECKING:
    from rlplug.training.row_layout import RowLayout

ROW = np.dtype(
    [(name, np.int64) for name in ["group", "home", "index", "length", "num_tokens", "num_routed", "place", "shared"]]
)
"""What every rank knows of a row: its group, the rank that has it and its index there, its tokens, its tokens that
train, its pairs of a token and a layer whose experts are replayed, and what :meth:`RowLayout.places` says of it."""

Passes = Sequence[Sequence[MicroBatch]]
"""The micro-batches of each ``data_rank``."""


class StepRows:
    """The rows of a step, by ascending group. Collective.

    Every rank has this table; the tokens are where they were generated.

    Args:
        batch: This rank's rows.
        strategy: Exchanges arrays between ranks.
        layout: Computes tokens that rows share once.

    Raises:
        RunError: Ranks have different tensors.
    """

    def __init__(self, batch: StepBatch, strategy: RLFSDP2Strategy, layout: RowLayout | None = None) -> None:
        self.batch = batch
        self.strategy = strategy
        self._require_same_tensors()
        mine = np.zeros(batch.num_sequences, ROW)
        mine["group"], mine["home"] = batch.per_sequence["group_index"], strategy.global_rank
        mine["index"], mine["length"] = np.arange(batch.num_sequences), batch.lengths
        mine["num_tokens"], mine["num_routed"] = batch.num_tokens, num_routed(batch)
        if layout is not None:
            mine["place"], mine["shared"] = layout.places(batch).T
        rows = strategy.gather_arrays(mine)
        self.table: NDArray[Any] = rows[np.lexsort((rows["index"], rows["group"]))]

    @property
    def num_sequences(self) -> int:
        return len(self.table)

    @cached_property
    def lengths(self) -> list[int]:
        """Length of each row in tokens, prompt included."""
        lengths: list[int] = self.table["length"].tolist()
        return lengths

    @cached_property
    def keys(self) -> list[tuple[int, int]]:
        """The group of each row, and its place among the rows of that group, from 0."""
        groups = self.table["group"]
        places = np.arange(len(groups)) - np.searchsorted(groups, groups)
        return list(zip(groups.tolist(), places.tolist(), strict=True))

    def denominators(self, row_indices: Sequence[int]) -> Denominators:
        """Count what trains in a mini-batch."""
        rows = self.table[list(row_indices)]
        return Denominators(
            num_tokens=int(rows["num_tokens"].sum()),
            num_sequences=int((rows["num_tokens"] > 0).sum()),
            num_routed=int(rows["num_routed"].sum()),
        )

    def fetch(self, passes: Passes) -> FetchedRows:
        """Send each row of ``passes`` to the ranks that compute it, once each. Collective."""
        return FetchedRows(self, passes)

    def _require_same_tensors(self) -> None:
        """Raise on all ranks if they would exchange different tensors, which an algorithm or a plugin made."""
        signature = "; ".join(
            f"{name} {array.dtype} {list(array.shape[1:])}"
            for fields in (self.batch.per_token, self.batch.per_sequence)
            for name, array in sorted(fields.items())
        )
        found = self.strategy.gather_arrays(np.array([signature.encode().ljust(2048)]))
        if len(set(found.tolist())) > 1:
            other = next(rank for rank, text in enumerate(found.tolist()) if text != found[0])
            raise RunError(
                f"ranks have different tensors in the step's batch: rank 0 {found[0].decode().strip()}, rank {other} "
                f"{found[other].decode().strip()}. An algorithm's advantages and the hook rlplug_prepare_batch must "
                "return the same ones on all ranks, on a rank without completions too."
            )


class FetchedRows:
    """The rows that this rank computes in some passes. Made by :meth:`StepRows.fetch`."""

    def __init__(self, rows: StepRows, passes: Passes) -> None:
        strategy = rows.strategy
        self.passes, self.micro_batches = passes, passes[strategy.data_rank]
        self._rows = rows
        self._is_alone = strategy.world_size == 1
        if self._is_alone:
            order = np.arange(rows.num_sequences)
            self._position, self._batch = order, rows.batch
            return
        self._computed = [_rows_of(part, with_fillers=False) for part in passes]
        needed = [_rows_of(part, with_fillers=True) for part in passes]
        wanted = [needed[data_rank] for data_rank in strategy.data_ranks]
        mine = _by_home(rows.table, needed[strategy.data_rank], strategy.world_size)
        self._position = np.zeros(rows.num_sequences, dtype=np.int64)
        self._position[np.concatenate(mine)] = np.arange(sum(map(len, mine)))
        sent = [rows.table["index"][_at_home(rows.table, each, strategy.global_rank)] for each in wanted]
        self._batch = _exchanged(rows.batch, sent, [rows.table["length"][part] for part in mine], strategy)

    def select(self, micro_batch: MicroBatch) -> StepBatch:
        """Return the rows of one of ``micro_batches``; what repeats some as a filler trains on none."""
        rows = self._batch.select(self._position[list(micro_batch.indices)])
        if not micro_batch.is_filler:
            return rows
        changed = {"response_mask": np.zeros_like(rows.per_token["response_mask"])}
        if "routed_experts" in rows.per_token:
            changed["routed_experts"] = np.full_like(rows.per_token["routed_experts"], NOT_RECORDED)
        return replace(rows, per_token={**rows.per_token, **changed})

    def shared_share(self, layout: RowLayout) -> float:
        """Return the share of the tokens of these passes, of all ranks, that are not computed a second time."""
        computed = [each.indices for part in self.passes for each in part if not each.is_filler]
        num_tokens = sum(int(self._rows.table["length"][list(rows)].sum()) for rows in computed)
        return 1 - layout.num_tokens(self._rows.table, computed) / max(num_tokens, 1)

    def gather_back(self, results: Sequence[Tensor]) -> Tensor:
        """Return what was computed for the tokens of this rank's own rows, wherever that was. Collective.

        Args:
            results: float [K] for each of ``micro_batches``, on any device.

        Returns:
            float32 [N], the rows of ``StepRows.batch`` end to end, on the CPU; 0 where nothing trains.
        """
        table, strategy = self._rows.table, self._rows.strategy
        counts = table["num_tokens"]
        found: dict[int, NDArray[np.float32]] = {}
        for micro_batch, result in zip(self.micro_batches, results, strict=True):
            if not micro_batch.is_filler:
                ends = counts[list(micro_batch.indices)].cumsum()
                found.update(zip(micro_batch.indices, np.split(result.float().cpu().numpy(), ends[:-1]), strict=True))
        nothing = np.empty(0, np.float32)
        if self._is_alone:
            return self._in_order(np.concatenate([nothing, *found.values()]), np.array(list(found), dtype=np.int64))
        # of ranks that share rows the first one sends
        ranks = range(strategy.world_size)
        leads = [strategy.data_ranks.index(strategy.data_ranks[rank]) == rank for rank in ranks]
        is_lead = leads[strategy.global_rank]
        mine = _by_home(table, self._computed[strategy.data_rank], strategy.world_size)
        parts = [np.concatenate([nothing, *(found[row] for row in part if is_lead)]) for part in mine]
        arriving = [
            _at_home(table, self._computed[data_rank], strategy.global_rank) if leads[rank] else np.empty(0, np.int64)
            for rank, data_rank in enumerate(strategy.data_ranks)
        ]
        values = strategy.exchange_arrays(parts, [int(counts[part].sum()) for part in arriving])
        return self._in_order(values, np.concatenate(arriving))

    def _in_order(self, values: NDArray[Any], rows: NDArray[np.int64]) -> Tensor:
        """Put values of trainable tokens, of rows that came end to end, at the tokens of this rank's batch, [N]."""
        batch, came = self._rows.batch, self._rows.table[rows]
        places = batch.per_token["response_mask"].nonzero()[0]  # of all trainable tokens, row after row
        ends = np.concatenate([[0], batch.num_tokens.numpy().cumsum()])
        starts = np.repeat(ends[came["index"]] - (came["num_tokens"].cumsum() - came["num_tokens"]), came["num_tokens"])
        found = np.zeros(batch.ends[-1], np.float32)
        found[places[starts + np.arange(len(values))]] = values
        return torch.from_numpy(found)


def num_routed(batch: StepBatch) -> NDArray[Any]:
    """Count each sequence's (token, layer) pairs whose experts are known, int64 [B]; 0 without router replay."""
    experts = batch.per_token.get("routed_experts")
    if experts is None:
        return np.zeros(batch.num_sequences, np.int64)
    # a token has experts in all layers, or in none
    num_known: NDArray[Any] = batch.sums(experts[:, 0, 0] != NOT_RECORDED)
    return np.asarray(num_known * experts.shape[1])


def _rows_of(micro_batches: Sequence[MicroBatch], with_fillers: bool) -> NDArray[np.int64]:
    """Return the rows of some passes, each once."""
    found = [row for each in micro_batches if with_fillers or not each.is_filler for row in each.indices]
    return np.array(list(dict.fromkeys(found)), dtype=np.int64)


def _at_home(table: NDArray[Any], rows: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
    """Return those of ``rows`` that ``rank`` has, in their order."""
    found: NDArray[np.int64] = rows[table["home"][rows] == rank]
    return found


def _by_home(table: NDArray[Any], rows: NDArray[np.int64], world_size: int) -> list[NDArray[np.int64]]:
    """Return the parts of ``rows`` that each rank has."""
    return [_at_home(table, rows, rank) for rank in range(world_size)]


def _exchanged(
    batch: StepBatch, sent: Sequence[NDArray[np.int64]], lengths: Sequence[NDArray[np.int64]], strategy: RLFSDP2Strategy
) -> StepBatch:
    """Send rows of ``batch`` to each rank, those of indices ``sent``, and return the rows that come, of ``lengths``."""
    num_rows, num_tokens = [len(part) for part in lengths], [int(part.sum()) for part in lengths]
    tokens_sent = [batch.tokens_of(rows) for rows in sent]
    return StepBatch(
        lengths=np.concatenate(lengths),
        per_sequence={
            name: strategy.exchange_arrays([values[rows] for rows in sent], num_rows)
            for name, values in sorted(batch.per_sequence.items())
        },
        per_token={
            name: strategy.exchange_arrays([values[tokens] for tokens in tokens_sent], num_tokens)
            for name, values in sorted(batch.per_token.items())
        },
        step=batch.step,
    )
