"""Rows of sources, read before a run; an error names the source's key and the row."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from rlplug.data.mixture import of_part
from rlplug.data.rows import PromptRow, check_row
from rlplug.data.sources import PromptSource
from rlplug.errors import ConfigError, describe

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
