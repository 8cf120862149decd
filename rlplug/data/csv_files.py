"""CSV files as records: text, numbers and gaps as they were written."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlplug.errors import ConfigError

_WHOLE: Final = re.compile(r"0|-?[1-9]\d{0,17}")
_GAPS: Final = {"", "NaN", "nan"}
"""What pandas writes, or may be told to write, for a number that is missing."""


def read_csv(path: Path, delimiter: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the line at which a row begins, and its columns by the header; an empty field is ``None``.

    A column is of numbers where that loses nothing: each field is written as Python writes the number, so that 007 and
    1.50 stay text.

    Raises:
        ConfigError: The file cannot be read; the message has its name and the line.
    """
    rows = _csv_rows(path, delimiter)
    _, header = next(rows, (1, []))
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ConfigError(f"{path}:1 has two columns {twice[0]!r}: give each a name of its own.")
    texts: set[str] = set()
    for line, fields in rows:
        if len(fields) != len(header):
            raise ConfigError(
                f"{path}:{line} has {len(fields)} fields, and the first line names {len(header)}: correct that row; a "
                'field with the delimiter, a quote or a line end stands in "quotes".'
            )
        texts |= {name for name, field in zip(header, fields, strict=True) if isinstance(_number(field), str)}
    for line, fields in itertools.islice(_csv_rows(path, delimiter), 1, None):
        named = zip(header, fields, strict=True)
        yield line, {name: (field or None) if name in texts else _number(field) for name, field in named}


def _number(field: str) -> int | float | str | None:
    """Return the number that a field is, ``None`` for a gap, or else the field."""
    if field in _GAPS:
        return None
    if _WHOLE.fullmatch(field):
        return int(field)
    try:
        number = float(field)
    except ValueError:
        return field
    return number if math.isfinite(number) and repr(number) == field else field


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line at which a row begins, and its fields; blank lines are skipped."""

    def lines() -> Iterator[str]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{path}:{number} is not UTF-8: {error}. Save it as UTF-8.") from error

    csv.field_size_limit(2**31 - 1)  # its default, 131,072 characters, is less than a long prompt
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    start = 1
    try:
        for fields in reader:
            if fields:
                yield start, fields
            start = reader.line_num + 1
    except csv.Error as error:
        raise ConfigError(f"{path}:{start} is not CSV: {error}. Correct that row.") from error
