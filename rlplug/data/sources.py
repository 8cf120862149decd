"""Sources of prompts: the base class, and files.

A source yields plain rows without tokenising them; ``PromptDataModule`` renders and tokenises them.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlplug.data.columns import DEFAULT_ANSWER_KEY, DEFAULT_PROMPT_KEY, Columns
from rlplug.data.prompt_stream import PromptStream
from rlplug.data.prompt_stream import TrainingPrompts as TrainingPrompts
from rlplug.data.record_files import read_records
from rlplug.data.rows import PromptRow as PromptRow
from rlplug.data.rows import check_row as check_row
from rlplug.data.rows import of_part
from rlplug.errors import ConfigError, describe, encodable
from rlplug.types.ranges import Rows, check_ranges

if TYPE_CHECKING:
    from rlplug.data.prompt_encoder import PromptEncoder


class TrainingRows(ABC):
    """Rows of a source that a training draws from, between reading them and making prompts of them."""

    known: Sequence[PromptRow] = ()
    """Rows that were read: all, or the first ones where the rest is read while training."""

    @abstractmethod
    def prompts(self, encoder: PromptEncoder, shuffle: bool, seed: int | str) -> TrainingPrompts:
        """Return the training prompts in the order in which they are drawn, the same on every rank.

        Args:
            encoder: Makes prompts of rows.
            shuffle: ``data.shuffle``.
            seed: Seed of the order.

        Raises:
            ConfigError: A row makes no prompt that can be trained on.
        """


class PromptSource(ABC):
    """Base class of prompt sources: an ordered collection of tasks."""

    @abstractmethod
    def rows(self) -> Iterator[PromptRow]:
        """Yield every row, an object of its own, in the same order and with the same uids each time, on every rank.

        Raises:
            ConfigError: The source cannot be read; the message says what to write instead.
        """

    def for_training(self, key: str, name: str = "") -> TrainingRows:
        """Return the rows for a training: by default all are read now, and drawn once an epoch.

        Args:
            key: Key of the source in the configuration, for messages.
            name: Its name in a mixture, which :func:`~rlplug.data.rows.of_part` gives its rows.

        Raises:
            ConfigError: The source cannot be read or has no prompts; the message begins with the key.
        """
        return AllRows(self, key, name)


class AllRows(TrainingRows):
    """All rows of a source, each of which is drawn once an epoch."""

    def __init__(self, source: PromptSource, key: str, name: str = "") -> None:
        self._key = key
        self.known = [of_part(row, name) for row in read_rows(key, source)]

    def prompts(self, encoder: PromptEncoder, shuffle: bool, seed: int | str) -> PromptStream:
        return PromptStream(encoder.usable(self._key, self.known), shuffle, seed)


def read_rows(key: str, source: PromptSource) -> list[PromptRow]:
    """Return all rows of a source.

    Raises:
        ConfigError: The source failed or has no prompts; the message begins with the key.
    """
    rows: list[PromptRow] = []
    try:
        for row in source.rows():
            rows.append(check_row(row))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:  # the code of a source, or of a library that it uses, may raise anything
        after = f"after the row {rows[-1].uid!r}" if rows else "at its first row"
        raise ConfigError(f"{key}: {type(source).__name__} failed {after}: {describe(error)}") from error
    if not rows:
        raise ConfigError(f"{key}: {type(source).__name__} has no prompts: give it at least one.")
    return rows


class FileSource(PromptSource):
    """Prompts from a file; fields other than prompt and answer become the row's metadata.

    Rows are named ``train.jsonl:17``, where 17 is the line (the row in parquet and in a JSON array), counted from 1.
    An empty field of a CSV file is ``None``; its columns are text, or numbers where that loses nothing.

    Args:
        path: File that ends in ``.jsonl`` (one JSON object a line), ``.json`` (an array of objects), ``.csv`` or
            ``.tsv`` (with a first line of names), or ``.parquet``.
        prompt_key: Field with the prompt: text, or a list of messages with ``role`` and ``content``. Here and below,
            ``reward_model.ground_truth`` is the field ``ground_truth`` inside ``reward_model``.
        answer_key: Field with the reference answer. The default may be absent from a row, whose answer is then
            ``None``; a field that you name must be there.
        limit: Read only this many rows from the start; by default all.
        columns: New names of columns, by their names, such as ``{question: prompt, solution: answer}``; every other
            option uses the new names, and rewards find the rest in ``metadata`` by them.
        template: Text of the prompt with columns in braces, such as ``"{question}\\nAnswer:"``, in place of
            ``prompt_key``; ``{{`` and ``}}`` are braces. A list has a line for each item, and with
            ``{choices:letters}`` its letter in front: ``A. sky``.
        system_prompt: System message in front of each prompt of this source, which becomes chat messages.
    """

    def __init__(
        self,
        path: str,
        prompt_key: str = DEFAULT_PROMPT_KEY,
        answer_key: str = DEFAULT_ANSWER_KEY,
        limit: Rows | None = None,
        columns: dict[str, str] | None = None,
        template: str | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.path, self.limit = path, limit
        check_ranges(self)
        self.columns = Columns(prompt_key, answer_key, dict(columns or {}), template, system_prompt)

    def rows(self) -> Iterator[PromptRow]:
        path = Path(os.path.expanduser(self.path))  # pathlib's raises for a user that does not exist
        is_empty = True
        for number, fields in itertools.islice(read_records(path), self.limit):
            read = self.columns.read(fields, f"{path}:{number}", is_first=is_empty)
            is_empty = False
            yield PromptRow(f"{encodable(path.name)}:{number}", *read)
        if is_empty:
            raise ConfigError(f"data source path {self.path!r} is empty: give a file with at least one prompt.")
