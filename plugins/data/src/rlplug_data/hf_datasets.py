"""``HFDatasetSource``, prompts from a Hugging Face dataset, and ``DatasetRows``, its rows when they are streamed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rlplug.data.columns import DEFAULT_ANSWER_KEY, DEFAULT_PROMPT_KEY, Columns
from rlplug.data.sources import PromptRow, PromptSource, TrainingRows
from rlplug.errors import ConfigError, did_you_mean
from rlplug.types.ranges import Count, Rows, check_ranges
from rlplug_data.streaming import RowStream, StreamedRows

MOST_STREAMED: Final = 100_000
"""Most rows of a streamed data set that are read at once, as for ``data.val``."""


class HFDatasetSource(PromptSource):
    """Prompts from a Hugging Face dataset; columns other than prompt and answer become the row's metadata.

    Rows are named ``gsm8k/main/train:17``, where 17 is the index in that split, counted from 0.

    Args:
        path: Name on the Hugging Face Hub, a folder written by ``save_to_disk``, or a folder of data files.
        name: Configuration of the dataset, such as ``main`` of ``openai/gsm8k``.
        split: Split to read.
        prompt_key: Column with the prompt: text, or a list of messages with ``role`` and ``content``. Here and below,
            ``reward_model.ground_truth`` is the column ``ground_truth`` inside ``reward_model``.
        answer_key: Column with the reference answer. The default may be absent, and answers are then ``None``; a
            column that you name must be there.
        limit: Read only this many rows from the start; by default all.
        columns: New names of columns, by their names, such as ``{question: prompt, solution: answer}``; every other
            option uses the new names, and rewards find the rest in ``metadata`` by them.
        template: Text of the prompt with columns in braces, such as ``"{question}\\nAnswer:"``, in place of
            ``prompt_key``; ``{{`` and ``}}`` are braces. A list has a line for each item, and with
            ``{choices:letters}`` its letter in front: ``A. sky``.
        system_prompt: System message in front of each prompt of this source, which becomes chat messages.
        streaming: Read the rows of ``data.train`` while training, without downloading or indexing the data set first;
            it needs ``model.num_steps``.
        shuffle_buffer: With ``streaming``, rows of a block, in which rows are shuffled and which memory holds.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        prompt_key: str = DEFAULT_PROMPT_KEY,
        answer_key: str = DEFAULT_ANSWER_KEY,
        limit: Rows | None = None,
        columns: dict[str, str] | None = None,
        template: str | None = None,
        system_prompt: str | None = None,
        streaming: bool = False,
        shuffle_buffer: Count = 1000,
    ) -> None:
        self.path = path
        self.name = name
        self.split = split
        self.limit = limit
        self.streaming = streaming
        self.shuffle_buffer = shuffle_buffer
        check_ranges(self)
        self.columns = Columns(prompt_key, answer_key, dict(columns or {}), template, system_prompt)

    def rows(self) -> Iterator[PromptRow]:
        if self.streaming:
            stream = self.stream()
            stream.begin(None)
            yield from itertools.islice(iter(stream.read, None), MOST_STREAMED)
            if stream.read() is not None:
                raise ConfigError(f"the source streams more than {MOST_STREAMED:,} rows: set its limit.")
            return
        prefix = self._prefix()
        for index, fields in enumerate(itertools.islice(self._load(), self.limit)):
            uid = f"{prefix}:{index}"
            yield PromptRow(uid, *self.columns.read(fields, f"data source {uid}", not index))

    def for_training(self, key: str, name: str = "") -> TrainingRows:
        if not self.streaming:
            return super().for_training(key, name)
        try:
            rows = self.stream()
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        return StreamedRows(rows, key, name)

    def stream(self) -> RowStream:
        """Return the rows of the data set, shard after shard, without downloading it first."""
        return DatasetRows(self._load(), self._prefix(), self.columns, self.limit, self.shuffle_buffer)

    def _prefix(self) -> str:
        folder = Path(self.path).expanduser()
        title = folder.name if os.path.isdir(folder) else self.path  # Path's raises where the name is too long
        return "/".join(part for part in (title, self.name, self.split) if part)

    def _load(self) -> Any:
        import datasets

        folder = Path(self.path).expanduser()
        try:
            if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
                if self.streaming:
                    raise ConfigError(
                        f"data source path {self.path!r} is a folder written by save_to_disk, which is read from "
                        "the disk as it is needed: leave out streaming."
                    )
                return self._split_of_saved(datasets.load_from_disk(str(folder)))
            path = str(folder) if folder.is_dir() else self.path
            return datasets.load_dataset(path, self.name, split=self.split, streaming=self.streaming)
        except ConfigError:
            raise
        # RuntimeError: a script-based data set, which datasets no longer runs; IndexError: a saved one without rows
        except (OSError, ValueError, RuntimeError, IndexError, datasets.exceptions.DatasetsError) as error:
            asked = f"path {self.path!r}, name {self.name!r}, split {self.split!r}"
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise ConfigError(f"data source {asked} cannot be loaded by datasets: {error}{cause}") from error

    def _split_of_saved(self, saved: Any) -> Any:
        """Return the configured split of a folder that ``save_to_disk`` wrote."""
        if self.name is not None:
            raise ConfigError(
                f"data source path {self.path!r} is a folder written by save_to_disk, which has no configurations: "
                f"leave out name (now {self.name!r})."
            )
        # a data set that was never part of a dictionary has no split name, and "train" is our default for it
        splits = list(saved) if isinstance(saved, dict) else [str(saved.split or "train")]
        if self.split not in splits:
            raise ConfigError(
                f"data source path {self.path!r} has no split {self.split!r}, only {', '.join(splits)}."
                f"{did_you_mean(self.split, splits)} To read a part of a split, use limit."
            )
        return saved[self.split] if isinstance(saved, dict) else saved


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
            return PromptRow(uid, *self._columns.read(record, f"data source {uid}", self._num_read == 1))
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
