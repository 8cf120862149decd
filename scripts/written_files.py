"""The command line of scripts that write a file, or the table of a page, from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from distributions import ROOT

END: Final = "<!-- End of the table. -->"


def write_or_check(
    about: str | None, file: Path, make: Callable[[str], str], arguments: Sequence[str] | None = None
) -> int:
    """Write a file, or with ``--check`` only compare it, and return the exit code.

    Args:
        about: The script's docstring.
        file: What the script writes, unless its command line names another file.
        make: Returns the file's text, given the text that is there.
        arguments: The command line's; this process's without them.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=file, help=f"the file; {file.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help="only compare, and exit with 1 when the file is stale")
    options = parser.parse_args(arguments)
    written = options.path.read_text() if options.path.is_file() else ""
    wanted = make(written)
    if not options.check:
        options.path.write_text(wanted)
    elif wanted != written:
        print(f"{options.path} is not what the code says: run make docs.", file=sys.stderr)
        return 1
    return 0


def with_table(page: str, begin: str, table: str) -> str:
    """Return a page with ``table`` between the comments ``begin`` and ``END``.

    Raises:
        SystemExit: The page lacks them.
    """
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise SystemExit(f"the page lacks the comments around its table: {begin} and {END}")
    return f"{before}{begin}\n\n{table}\n\n{END}{after}"
