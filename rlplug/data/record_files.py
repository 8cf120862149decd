"""Files of records: JSON Lines, JSON arrays, CSV and parquet, read as rows of columns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlplug.data.rows import optional_import
from rlplug.errors import ConfigError

Records = Iterator[tuple[int, Mapping[str, Any]]]
"""Numbers of rows, counted from 1, and their columns."""


def read_records(path: Path) -> Records:
    """Yield the records of a file, by its ending in any case; a ``ConfigError`` has its name and the row."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"data source path {str(path)!r} ends in {path.suffix!r}: give a .jsonl file (one JSON object a line), a "
            ".json file (an array of objects), a .csv, .tsv or .parquet file."
        )
    if not path.is_file():
        raise ConfigError(f"data source path {str(path)!r} is not a file: give the path of a file that exists.")
    try:
        yield from reader(path)
    except OSError as error:
        raise ConfigError(
            f"data source path {str(path)!r} cannot be read: {error.strerror}. Look at its disk."
        ) from error


def _read_jsonl(path: Path) -> Records:
    """Yield line numbers and objects; blank lines are skipped."""
    # in binary, so that an error can name a line that is not UTF-8
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                fields = _parsed(line.rstrip(), path, number)
                yield number, _as_object(fields, f"{path}:{number}", "each line must be an object")


def _read_json(path: Path) -> Records:
    """Yield the objects of an array, numbered from 1; a file of one object a line is read as JSON Lines."""
    data = path.read_bytes()
    if data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{":
        if len(data.split(b"\n", 1)[0].strip()) > 1:  # more than a brace: the line is a row
            yield from _read_jsonl(path)
            return
        raise ConfigError(
            f"data source path {str(path)!r} is one JSON object over several lines: give an array of objects, or one "
            "object a line."
        )
    found = _parsed(data, path) if data.strip() else []
    if not isinstance(found, list):
        raise ConfigError(f"data source path {str(path)!r} is {json.dumps(found)[:60]}: give an array of objects.")
    for number, fields in enumerate(found, start=1):
        yield number, _as_object(fields, f"{path}:{number}", "each row must be an object")


def _parsed(text: bytes, path: Path, line: int | None = None) -> Any:
    """Return what JSON says: a whole file, or the line of that number."""
    place = str(path) if line is None else f"{path}:{line}"
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = f"{path}:{line or error.lineno}, column {error.colno},"
        raise ConfigError(f"{place} is not JSON: {error.msg}. Correct it.") from error
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON that can be read: {error}. Correct it.") from error
    except RecursionError as error:
        raise ConfigError(f"{place} is JSON of too many levels of brackets: take some out.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; ``ValueError`` for one with a key twice, of which Python would take the last value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"the key {max(fields, key=[name for name, _ in pairs].count)!r} is there twice")
    return fields


def _as_object(fields: Any, where: str, rule: str) -> Mapping[str, Any]:
    if isinstance(fields, dict):
        return fields
    raise ConfigError(f'{where} is {json.dumps(fields)[:60]}: {rule}, such as {{"prompt": "1 + 1 =", "answer": "2"}}.')


def _read_csv(path: Path) -> Records:
    from rlplug.data.csv_files import read_csv

    return read_csv(path, "\t" if path.suffix.lower() == ".tsv" else ",")


def _read_parquet(path: Path) -> Records:
    """Yield row numbers and rows."""
    parquet = optional_import("pyarrow.parquet", "pyarrow", f"data source path {str(path)!r}")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ConfigError(f"data source path {str(path)!r} is no valid parquet: {error}. Write it anew.") from error
    with file:
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches())
        yield from enumerate(rows, start=1)


READERS: Final[Mapping[str, Callable[[Path], Records]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
"""Readers by the ending of a file's name, in small letters."""
