"""Sources of prompts: files, and in ``hf_datasets`` Hugging Face datasets.

A source yields plain rows without tokenising them; ``PromptDataModule`` renders and tokenises them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlplug.data.columns import DEFAULT_ANSWER_KEY, DEFAULT_PROMPT_KEY, Columns
from rlplug.data.rows import PromptRow as PromptRow
from rlplug.data.rows import PromptSource as PromptSource
from rlplug.data.rows import check_row as check_row
from rlplug.data.rows import of_part, optional_import
from rlplug.errors import ConfigError, describe, encodable
from rlplug.types.ranges import Rows, check_ranges

MOST_STREAMED_VAL: Final = 100_000
"""Most rows of a streamed source as ``data.val``, all of which are read."""


def where(split: str, name: str) -> str:
    """Return the configuration key of a source, or of a mixture's part."""
    return f"data.{split}.init_args.sources.{name}" if name else f"data.{split}"


def read_rows(split: str, source: PromptSource, streamed: Container[str]) -> list[PromptRow]:
    """Return all rows of a source, but for those of its parts that are ``streamed``.

    Args:
        split: ``train`` or ``val``.
        source: The source.
        streamed: Names of parts that are read as they are drawn.

    Raises:
        ConfigError: The source failed or has no prompts; the message names its key.
    """
    rows: list[PromptRow] = []
    for name, part in source.parts().items():
        if name not in streamed:
            rows += [of_part(row, name) for row in _read_part(where(split, name), part)]
    return rows


def _read_part(where: str, source: PromptSource) -> list[PromptRow]:
    rows: list[PromptRow] = []
    try:
        for row in source.rows():
            check_row(row)
            rows.append(row)
            if len(rows) > MOST_STREAMED_VAL and source.stream() is not None:
                raise ConfigError(f"the source streams more than {MOST_STREAMED_VAL:,} rows: set its limit.")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # the code of a source, or of a library that it uses, may raise anything
        after = f"after the row {rows[-1].uid!r}" if rows else "at its first row"
        raise ConfigError(f"{where}: {type(source).__name__} failed {after}: {describe(error)}") from error
    if not rows:
        raise ConfigError(f"{where}: {type(source).__name__} has no prompts: give it at least one.")
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
