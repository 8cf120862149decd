"""Runs wrong command lines in forks of one process, up to loading a model or further, and says how each ends.

``config_mutations.py`` and ``wrong_inputs.py`` generate them: each is a script whose options are those of :func:`main`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

ROOT = Path(__file__).parents[2]
LIMIT_S: Final = 60.0
"""Seconds after which a command line counts as hanging."""
RAW: Final = re.compile(
    r"<class '|Got value|unhashable|has no attribute '|not (?:supported|subscriptable|iterable)|NoneType"
)
"""Words of Python, or of jsonargparse, that say no remedy."""
REMEDY: Final = re.compile(
    r"\b(?i:add|change|choose|copy|correct|did you mean|drop|give|implement|install|keep|leave|look|lower|make|mend"
    r"|must be|name|put|raise|remove|rename|run|save|set|shorten|start|takes?|use|write)\b|All keys:|Options:"
    r"|complete configuration|needs a value, such as"
)
"""Words that say what to do; every message has one."""
LOADS: Final = 77
"""Exit code of a command line that would load a model now, so was accepted."""


class WrongRun(Protocol):
    """What :func:`run` runs."""

    @property
    def name(self) -> str: ...

    def arguments(self) -> list[str]: ...

    def is_named(self, message: str) -> bool: ...


@dataclass(frozen=True)
class Ending:
    """How a command line ended."""

    case: WrongRun
    kind: str
    """``message``, ``traceback``, ``accepted``, ``no key``, ``no remedy``, ``raw``, ``long message`` or ``hang``."""
    output: str


def run(case: WrongRun, until: str) -> Ending:
    """Run ``rlplug fit`` in a fork of this process, which has the imports, until it would call ``until``."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        pid = os.fork()
        if pid == 0:
            _child(case, Path(folder), writer, until)
        os.close(writer)
        output, in_time = _read(reader)
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL) if not in_time else None
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ending(case, kind_of(case, code, output) if in_time else "hang", output)


def _read(reader: int) -> tuple[str, bool]:
    """Return what a process printed, and whether it ended in time."""
    end, parts = time.monotonic() + LIMIT_S, []
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (part := os.read(reader, 1 << 16)):
            return b"".join(parts).decode(errors="replace"), True
        parts.append(part)
    return b"".join(parts).decode(errors="replace"), False


def _child(case: WrongRun, folder: Path, writer: int, until: str) -> None:
    """Run the command line, and end this process."""
    code = 70
    try:
        for descriptor in (1, 2):
            os.dup2(writer, descriptor)
        os.close(writer)
        os.chdir(folder)
        for name in ("examples", "tests", "configs"):
            os.symlink(ROOT / name, name)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0), write_through=True)
        sys.path.insert(0, str(folder))
        import rlplug.setup.start
        from rlplug.cli.main import main

        owner = rlplug.setup.start if until == "build_models" else rlplug.setup.start.RunModule
        setattr(owner, until, lambda *_, **__: os._exit(LOADS))
        code = main(case.arguments())
    except SystemExit as ending:
        code = 71 if ending.code else 72
    except BaseException:  # noqa: BLE001 - any of them is what the case found
        traceback.print_exc()
    finally:
        os._exit(code)


def kind_of(case: WrongRun, code: int, output: str) -> str:
    """Classify an ending: one message, that names what is wrong, or something else."""
    if code == LOADS or code == 0:
        return "accepted"
    if "Traceback (most" in output or code not in (1, 2) or output.count("rlplug: ") != 1:
        return "traceback"
    message = output[output.index("rlplug: ") :]
    if len(message) > 1500 or message.count("\n") > 6:
        return "long message"
    if RAW.search(message):
        return "raw"
    if not REMEDY.search(message):
        return "no remedy"
    return "message" if case.is_named(message) else "no key"


def import_all() -> None:
    """Import what command lines need, on one thread, so that forks begin with it."""
    sys.path.insert(0, str(ROOT / "tests"))
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.chdir(ROOT)
    import fork_server

    fork_server.import_all()


def main(generate: Callable[[tuple[str, ...]], Iterator[WrongRun]], bases: tuple[str, ...], until: str) -> None:
    """Run the generated cases that the options choose, and print how each ended.

    Args:
        generate: Yields the cases of some bases.
        bases: All of them.
        until: What counts as accepted: ``build_models`` or ``start_run``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--bases", nargs="*", default=bases, help="names in configs/algo; empty for the quickstart")
    parser.add_argument("--share", type=float, default=1.0, help="share of the cases to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="run each case whose number is A modulo B")
    parser.add_argument("--match", default="", help="only cases whose name matches this expression")
    options = parser.parse_args()
    import_all()
    draw = random.Random(options.seed)
    part, num_parts = options.part
    chosen = [
        case
        for number, case in enumerate(generate(tuple(options.bases)))
        if draw.random() < options.share and re.search(options.match, case.name) and number % num_parts == part
    ]
    counts: collections.Counter[str] = collections.Counter()
    for case in chosen:
        ending = run(case, until)
        counts[ending.kind] += 1
        print(json.dumps({"kind": ending.kind, "case": case.name, "output": ending.output[-3000:]}), flush=True)
    print(json.dumps(counts), file=sys.stderr)


# ---- for tests ------------------------------------------------------------------------------------------------------


def faults(table: str, is_legal: Callable[[str], bool], *options: str, timeout: float) -> tuple[int, list[str]]:
    """Return the number of cases that ``table``, a script beside this one, has generated, and the badly ended ones.

    Args:
        is_legal: Whether a run may accept the case of that name.
        options: Those of :func:`main`.
        timeout: For all of them, in seconds.
    """
    from forked import run_forked

    done = run_forked([sys.executable, Path(__file__).with_name(table), *options], timeout=timeout, check=True)
    endings = [json.loads(line) for line in done.stdout.splitlines()]
    bad = [
        f"{ending['kind']}: {ending['case']}: {ending['output'][-600:]}"
        for ending in endings
        if ending["kind"] != "message" and not (ending["kind"] == "accepted" and is_legal(ending["case"]))
    ]
    return len(endings), bad
