"""What a check of ``rlplug doctor`` finds, programs that checks start, and how findings are printed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, TypeAlias

State: TypeAlias = Literal["ok", "note", "warns", "fails"]
"""``note`` is worth knowing, ``warns`` may go wrong, ``fails`` will."""

WIDTH: Final = 22
LONGEST: Final = 2000
"""Longest text of a program that is quoted, in characters."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    area: str
    what: str
    """Name of the thing: "Python", "disk of runs/"."""
    found: str
    state: State = "ok"
    advice: str = ""
    """What to do, for a state that is not ``ok``."""


class ProbeError(Exception):
    """A program did not start, failed or took too long; the text says which."""


class Probe:
    """A program that runs while other things are looked at.

    Args:
        command: Program and arguments.
        timeout_s: Longest time in seconds, from when its output is asked for.
    """

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self.command = list(command)
        self._timeout_s = timeout_s
        self._problem: str | None = None
        self._output = ""
        self.is_missing = False
        """Whether there is no such program."""
        self._process: subprocess.Popen[str] | None = None
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self._process = subprocess.Popen(self.command, text=True, errors="replace", **pipes)  # type: ignore[call-overload]
        except FileNotFoundError:
            self.is_missing = True
        except OSError as error:
            self._problem = f"did not start: {error.strerror or error}"

    def output(self) -> str:
        """Wait for the program and return what it wrote to stdout.

        Raises:
            ProbeError: It did not start, took too long, or wrote nothing and failed.
        """
        if self._process is not None:
            process, self._process = self._process, None
            try:
                self._output, errors = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                self._problem = f"took longer than {self._timeout_s:g} s"
            else:
                if process.returncode and not self._output.strip():
                    how = f"status {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
                    self._problem = f"ended with {how}: {errors.strip()[-LONGEST:]}"
        if self.is_missing:
            raise ProbeError("is not installed")
        if self._problem is not None:
            raise ProbeError(self._problem)
        return self._output


def checked(area: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return what a check finds; what it raises is a finding too, so that the others are still reported."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:  # noqa: BLE001 - the machine may be broken in any way
        text = f"{type(error).__name__}: {error}"[:LONGEST]
        found.append(Finding(area, "this check", f"broke off: {text}", "warns", "Look at what it names; report it."))
    return found


def lines_of(findings: Iterable[Finding], is_quick: bool) -> Iterator[str]:
    """Yield the lines of the report: the findings by area, then how many of each kind."""
    listed = list(findings)
    for area, found in groupby(listed, lambda finding: finding.area):
        yield area
        for finding in found:
            yield shown(f"  {finding.state:<5} {finding.what:<{WIDTH}} {finding.found}")
            if finding.advice:
                yield shown(f"        -> {finding.advice}")
        yield ""
    fails, warns = (sum(finding.state == state for finding in listed) for state in ("fails", "warns"))
    rest = "; torch and plugins were not imported: leave out --quick for that" if is_quick else ""
    yield f"{fails} {'thing' if fails == 1 else 'things'} will fail, {warns} may go wrong{rest}"


def shown(text: str) -> str:
    """Return text on one line in which no character moves the cursor; it may come from a program or a file name."""
    return "".join(c if c.isprintable() else " " if c == "\n" else c.encode("unicode_escape").decode() for c in text)
