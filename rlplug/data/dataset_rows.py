"""``DatasetRows``: rows of a streaming data set of the package ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rlplug.data.columns import Columns
from rlplug.data.rows import PromptRow, RowStream
from rlplug.errors import ConfigError


class DatasetRows(RowStream):
    """Rows of a streaming data set of ``datasets``, shard after shard.

    Args:
        dataset: ``datasets.IterableDataset``, in the order of its files.
        prefix: Start of the rows' names.
        columns: Rules by which a record becomes a row.
        limit: Rows of a pass, which then has the order of the files.
        shuffle_buffer: Rows in a block.
    """

    def __init__(self, dataset: Any, prefix: str, columns: Columns, limit: int | None, shuffle_buffer: int) -> None:
        self.shuffle_buffer = shuffle_buffer
        self._dataset, self._prefix, self._columns, self._limit = dataset, prefix, columns, limit
        self._order = list(range(dataset.num_shards))
        self._place, self._num_in_shard, self._num_read = 0, 0, 0
        self._shard: Any = None
        self._records: Iterator[dict[str, Any]] = iter(())

    def begin(self, order: torch.Generator | None) -> None:
        num_shards = self._dataset.num_shards
        is_shuffled = order is not None and self._limit is None
        self._order = torch.randperm(num_shards, generator=order).tolist() if is_shuffled else list(range(num_shards))
        self._place, self._num_read = 0, 0
        self._open()

    def _open(self, state: Any = None) -> None:
        self._num_in_shard = 0
        self._shard, self._records = None, iter(())
        if self._place < len(self._order):
            self._shard = self._dataset.shard(num_shards=len(self._order), index=self._order[self._place])
            if state is not None:
                self._shard.load_state_dict(state)
            self._records = iter(self._shard)

    def read(self) -> PromptRow | None:
        while self._place < len(self._order) and self._num_read != self._limit:
            record = next(self._records, None)
            if record is None:
                self._place += 1
                self._open()
                continue
            shard = f"{self._order[self._place]}/" if len(self._order) > 1 else ""
            uid = f"{self._prefix}:{shard}{self._num_in_shard}"
            self._num_in_shard += 1
            self._num_read += 1
            return PromptRow(uid, *self._columns.read(record, f"data source {uid}"))
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": list(self._order),
            "place": self._place,
            "num_in_shard": self._num_in_shard,
            "num_read": self._num_read,
            "shard": None if self._shard is None or not self._num_in_shard else self._shard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if sorted(state["order"]) != list(range(self._dataset.num_shards)):
            raise ConfigError(
                f"The checkpoint was written when data.train had {len(state['order'])} files, and it has "
                f"{self._dataset.num_shards} now: restore them, or start a new run from its weights."
            )
        self._order, self._place = list(state["order"]), state["place"]
        self._open(state["shard"])
        self._num_in_shard, self._num_read = state["num_in_shard"], state["num_read"]
