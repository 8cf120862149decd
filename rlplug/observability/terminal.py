"""The terminal: every table, line and display of a process goes through this module.

Text from outside (a prompt, a completion, an error of a server, a path) is shown as it is written: it is never markup,
and a control character in it is shown as its escape, ``\\x1b``. Two rules hold that. :func:`say` and :func:`make_table`
take plain strings alone, and no other module imports rich. Inside :func:`guarded`, where every command runs, all else
that is written to stdout and stderr (``print``, warnings, logs, tracebacks) passes a filter that lets no control
character through, and appears above the progress display while there is one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_HIDDEN: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\u00ad\u061c\u180e\u200b\u200d\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    # invisible ones, and those that reorder
    "\ud800-\udfff"  # halves of surrogate pairs, which no encoding holds
    "\U000e0000-\U000e0fff"  # tags
)
_UNSAFE: Final = re.compile(f"[{_HIDDEN}]")
_UNSAFE_IN_STREAM: Final = re.compile(f"(?!\r)[{_HIDDEN}]")
_COLOUR: Final = re.compile("\x1b\\[[0-9;:]*m")


def visible(text: str) -> str:
    """Return ``text`` with escapes for control characters, bidirectional and invisible ones, and lone surrogates.

    Line feeds and tabs stay, and so does the non-joiner that Persian needs. The joiner of emoji does not: terminals
    disagree about the width of what it joins.
    """
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def styled(text: str, style: str = "") -> Text:
    """Return text from anywhere for rich, which finds neither markup nor control characters in it."""
    return Text(visible(text).expandtabs(4), style=style)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str, num_totals: int = 0) -> Table:
    """Return a table of plain texts.

    Args:
        columns: Titles of the columns.
        rows: Cells of each row.
        title: Line above the table.
        num_totals: Number of last rows that a line sets apart, with numbers in all columns but the first.
    """
    table = Table(title=styled(title), title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(styled(column), justify="right" if num_totals and index else "left", overflow="fold")
    cells = [[styled(cell) for cell in row] for row in rows]
    for number, row in enumerate(cells, start=1):
        table.add_row(*row, end_section=number == len(cells) - num_totals)
    return table


def say(*parts: str | tuple[str, str], wraps: bool = False) -> None:
    """Print a line on stdout.

    Args:
        parts: Plain texts, or pairs of a text and rich's name of its style; joined without spaces.
        wraps: Break long lines between words. Otherwise the terminal breaks them, so that a command can be copied.
    """
    line = Text.assemble(*(styled(part) if isinstance(part, str) else styled(*part) for part in parts))
    console().print(line, soft_wrap=not wraps)


def invocation() -> str:
    """Return how this process's command can be typed again: ``rlplug``, or its path where the shell finds no such one.

    After ``make quickstart`` that is ``.venv/bin/rlplug``, as long as the environment is not activated.
    """
    script = Path(sys.argv[0])
    if script.name != "rlplug":
        return f"{shlex.quote(os.path.relpath(sys.executable))} -m rlplug" if script.name == "__main__.py" else "rlplug"
    found = shutil.which("rlplug")
    if found is not None and script.exists() and Path(found).resolve() == script.resolve():
        return "rlplug"
    return shlex.quote(os.path.relpath(script))


def show(table: Table) -> None:
    """Print a table on stdout."""
    console().print(table)


# ---- the console, and all other writers -----------------------------------------------------------------------------

_console: Console | None = None
_live: Live | None = None


def console() -> Console:
    """Return the process's console, on stdout."""
    global _console
    if _console is None:
        _console = Console(markup=False, highlight=False, emoji=False)
    return _console


def is_interactive() -> bool:
    """Return whether stdout and stderr both are terminals, where a live display can be: one in a pipe breaks it."""
    return console().is_terminal and not console().is_dumb_terminal and sys.stderr.isatty()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Filter what is written to stdout and stderr, and end a live display at the end, whatever happens."""
    global _console
    if isinstance(sys.stdout, _GuardedStream):
        yield
        return
    streams, before = (sys.stdout, sys.stderr), _console
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character ends no run
    _console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    sys.stdout, sys.stderr = (cast(TextIO, _GuardedStream(stream)) for stream in streams)
    try:
        yield
    finally:
        stop_live()
        sys.stdout, sys.stderr = streams
        _console = before


def start_live(live: Live) -> None:
    """Start a live display at the bottom of the terminal, made with :func:`console`; all else is printed above it."""
    global _live
    stop_live()
    _live = live
    live.start()


def stop_live() -> None:
    """Stop the live display, if there is one, so that the cursor is shown again."""
    global _live
    live, _live = _live, None
    if live is not None:
        live.stop()


def _forget_live() -> None:
    """Leave the display to the parent: the thread that draws it, and may hold its lock, is not in a forked child."""
    global _live
    _live = None


os.register_at_fork(after_in_child=_forget_live)


class _GuardedStream:
    """stdout or stderr for all but the console: neither control characters nor broken displays come through.

    Colours that libraries choose are dropped. A carriage return passes, because bars of downloads need it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""
        """The unfinished line, while there is a live display."""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        plain = _UNSAFE_IN_STREAM.sub(_escape, _COLOUR.sub("", text))
        if _live is None:
            self._stream.write(plain)
            return len(text)
        with self._lock:
            *lines, rest = (self._line + plain).split("\n")
            self._line = rest.rpartition("\r")[2]
            for line in lines:
                console().print(styled(line.rstrip("\r").rpartition("\r")[2]), soft_wrap=True)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
