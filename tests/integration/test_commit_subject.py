"""The hook that checks a commit's subject, as git calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT

pytestmark = pytest.mark.nightly  # of a script for maintainers


def check(message: str, folder: Path) -> tuple[int, str]:
    file = folder / "COMMIT_EDITMSG"
    file.write_text(message)
    command = [sys.executable, str(ROOT / "scripts/check_commit_subject.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "message",
    [
        "Find plugins from their folders\n",
        "x" * 72 + "\n\nThe body may be as long as it likes, and " + "y" * 200 + "\n",
        "# a comment of git's\nFind plugins\n# another\n",
        'Revert "' + "x" * 72 + '"\n',
    ],
)
def test_good_subject_passes(message: str, tmp_path: Path) -> None:
    assert check(message, tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("x" * 73, "the subject has 73 characters: say it in 72"),
        ("", "no subject"),
        ("# only a comment\n", "no subject"),
        ("Find plugins.\n", "ends with a full stop"),
        ("Find plugins\nfrom their folders\n", "the body follows the subject at once"),
    ],
)
def test_bad_subject_is_refused(message: str, problem: str, tmp_path: Path) -> None:
    code, error = check(message, tmp_path)

    assert code == 1
    assert problem in error
