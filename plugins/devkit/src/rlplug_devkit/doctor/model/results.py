"""Results of the checks of a model: each is timed, may fail in any way, and says on stderr that it still runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from rlplug.errors import ConfigError, describe
from rlplug_devkit.doctor.findings import shown

Held: TypeAlias = Literal["yes", "no", "note", "skipped"]
"""``note`` held, with something worth knowing; ``skipped`` was not tried, and the result says why."""

STILL_RUNS_S: Final = 10.0
"""Time between two lines about a check that still runs, in seconds."""


class Verdict(NamedTuple):
    """What a check found."""

    found: str
    held: Held = "yes"
    advice: str = ""
    """What to do, where ``held`` is not ``yes``."""


@dataclass(frozen=True)
class Result:
    """A check and what it found."""

    check: str
    held: Held
    seconds: float
    found: str
    advice: str = ""


class NotLoadedError(Exception):
    """What a check needs could not be loaded, as the result of an earlier check says."""


def result_of(name: str, check: Callable[[], Verdict], what: str = "") -> Result:
    """Run a check; what it raises is its result.

    Args:
        name: Name of the check.
        check: The check.
        what: What takes long in it, for the lines on stderr, such as ``14.2 GiB of weights``.
    """
    started = time.monotonic()
    try:
        with _Progress(f"{name} ({what})" if what else name):
            verdict = check()
    except NotLoadedError as missing:
        verdict = Verdict(f"not tried: {missing}", "skipped")
    except ConfigError as refusal:  # its text says what to do
        verdict = Verdict(str(refusal), "no")
    except Exception as error:  # noqa: BLE001 - a model and its files may raise anything
        verdict = Verdict(describe(error, with_line=True), "no", "Look at what it names: a run raises it too.")
    return Result(name, verdict.held, time.monotonic() - started, verdict.found, verdict.advice)


class _Progress:
    """Writes a line to stderr every ``STILL_RUNS_S`` seconds while its body runs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._report, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _report(self) -> None:
        started = time.monotonic()
        while not self._ended.wait(STILL_RUNS_S):
            print(shown(f"  {self._what}: {time.monotonic() - started:.0f} s"), file=sys.stderr, flush=True)


def lines_of(results: Iterable[Result]) -> Iterator[str]:
    """Yield the table: a line for each check, and what to do; then how many failed."""
    listed = list(results)
    width = max(len(result.check) for result in listed)
    yield f"{'check':<{width}}  {'held':<7}  {'seconds':>7}"
    for result in listed:
        yield shown(f"{result.check:<{width}}  {result.held:<7}  {result.seconds:7.1f}  {result.found}")
        if result.advice:
            yield shown(f"{'':<{width}}  -> {result.advice}")
    failed, skipped = (sum(result.held == held for result in listed) for held in ("no", "skipped"))
    rest = f", {skipped} not tried" if skipped else ""
    yield f"{len(listed) - failed - skipped} of {len(listed)} checks held, {failed} failed{rest}"
