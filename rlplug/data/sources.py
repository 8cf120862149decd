"""Sources of prompts: the base class, and files.

A source yields plain rows without tokenising them; ``PromptDataModule`` renders and tokenises them.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplug.data.columns import DEFAULT_ANSWER_KEY, DEFAULT_PROMPT_KEY, Columns
from rlplug.data.prompt_stream import PromptStream, TrainingPrompts
from rlplug.data.rows import PromptRow as PromptRow
from rlplug.data.rows import check_row as check_row
from rlplug.data.rows import of_part, optional_import
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
        """Yield every row, in the same order and with the same uids each time and on every rank.

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
            check_row(row)
            rows.append(row)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:  # the code of a source, or of a library that it uses, may raise anything
        after = f"after the row {rows[-1].uid!r}" if rows else "at its first row"
        raise ConfigError(f"{key}: {type(source).__name__} failed {after}: {describe(error)}") from error
    if not rows:
        raise ConfigError(f"{key}: {type(source).__name__} has no prompts: give it at least one.")
    return rows


class FileSource(PromptSource):
    """Prompts from a JSONL or parquet file; fields other than prompt and answer become the row's metadata.

    Rows are named ``train.jsonl:17``, where 17 is the line (the row in parquet), counted from 1.

    Args:
        path: File that ends in ``.jsonl`` (one JSON object a line) or ``.parquet``.
        prompt_key: Field with the prompt: text, or a list of messages with ``role`` and ``content``.
        answer_key: Field with the reference answer. The default may be absent from a row, whose answer is then
            ``None``; a field that you name must be there.
        limit: Read only this many rows from the start; by default all.
        columns: New names of columns, by their names, such as ``{question: prompt, solution: answer}``; every other
            option uses the new names, and rewards find the rest in ``metadata`` by them.
        template: Text of the prompt with columns in braces, such as ``"{question}\\nAnswer:"``, in place of
            ``prompt_key``; ``{{`` and ``}}`` are braces.
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
        self.path = path
        self.limit = limit
        check_ranges(self)
        self.columns = Columns(prompt_key, answer_key, dict(columns or {}), template, system_prompt)

    def rows(self) -> Iterator[PromptRow]:
        path = Path(self.path).expanduser()
        readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
        if path.suffix not in readers:
            raise ConfigError(
                f"data source path {self.path!r} ends in {path.suffix!r}: give a .jsonl file (one JSON object a line) "
                "or a .parquet file."
            )
        if not path.is_file():
            raise ConfigError(f"data source path {self.path!r} is not a file: give the path of a file that exists.")
        is_empty = True
        for number, fields in itertools.islice(readers[path.suffix](path), self.limit):
            read = self.columns.read(fields, f"{path}:{number}", is_first=is_empty)
            is_empty = False
            yield PromptRow(f"{encodable(path.name)}:{number}", *read)
        if is_empty:
            raise ConfigError(f"data source path {self.path!r} is empty: give a file with at least one prompt.")


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield line numbers, counted from 1, and objects; blank lines are skipped."""
    # in binary, so that an error can name a line that is not UTF-8
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number}, column {error.colno}, is not JSON: {error.msg}.") from error
            except ValueError as error:
                raise ConfigError(f"{path}:{number} is not JSON: {error}.") from error
            except RecursionError as error:
                raise ConfigError(f"{path}:{number} is JSON of too many levels of brackets.") from error
            if not isinstance(fields, dict):
                raise ConfigError(
                    f"{path}:{number} is a JSON {type(fields).__name__}: each line must be an object, such as "
                    '{"prompt": "1 + 1 =", "answer": "2"}.'
                )
            yield number, fields


def _read_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield row numbers, counted from 1, and rows."""
    parquet = optional_import("pyarrow.parquet", "pyarrow", f"data source path {str(path)!r}")
    try:
        file = parquet.ParquetFile(path)
    # pyarrow's ArrowInvalid is a ValueError
    except (OSError, ValueError) as error:
        raise ConfigError(f"data source path {str(path)!r} is not a valid parquet file: {error}") from error
    with file:
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
        yield from enumerate(rows, start=1)
