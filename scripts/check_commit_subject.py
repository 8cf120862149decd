"""Checks the subject of a commit message; git calls it as its commit-msg hook: ``check_commit_subject.py FILE``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Final

MAX_LENGTH: Final = 72
_MADE_BY_GIT: Final = re.compile(r"Merge |Revert \"|fixup! |squash! |amend! ")


def problem_of(message: str) -> str | None:
    """Return what is wrong with a message's first lines, or nothing."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if _MADE_BY_GIT.match(subject):
        return None
    if not subject.strip():
        return "the commit has no subject: write what it does in the first line."
    if len(subject) > MAX_LENGTH:
        return f"the subject has {len(subject)} characters: say it in {MAX_LENGTH}, and the rest in the body."
    if subject.endswith("."):
        return "the subject ends with a full stop: leave it out."
    if len(lines) > 1 and lines[1].strip():
        return "the body follows the subject at once: leave a line between them empty."
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("message", type=Path, help="the file with the message")
    if problem := problem_of(parser.parse_args().message.read_text()):
        print(f"commit message: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
