"""A source of prompts that leaves most of a file out."""

from __future__ import annotations

from collections.abc import Iterator

from rlplug.data.sources import FileSource, PromptRow


class Sevens(FileSource):
    """Rows of a file whose prompt begins with a seven."""

    def rows(self) -> Iterator[PromptRow]:
        return (row for row in super().rows() if str(row.prompt).startswith("7"))
