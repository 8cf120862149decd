"""Runs what needs GPUs, each claim in processes of its own, one failure aside from the next, and keeps the figures.

    python benchmarks/gpu_debts.py --list
    python benchmarks/gpu_debts.py --out OUT --path vllm=/site/vllm --budget 400
    python benchmarks/gpu_debts.py --out OUT --only restart vllm-bf16
    python benchmarks/gpu_debts.py --table OUT...

Claims are those of ``gpu_debt_list.py``, and start in that order. Those that need one GPU share it as far as their
memory goes, unless they are timed; those that need two wait for both. ``OUT/debts.json`` and ``OUT/debts.md`` are
written anew after each one, and ``OUT/NAME.log`` holds what it printed. ``--tiny`` tries the commands on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu_debt import Debt
from gpu_debt_list import DEBTS
from gpu_debt_table import Outcome, markdown, read_outcomes

ROOT: Final = Path(__file__).parents[1]
SHARED: Final = 0.9
"""Share of a GPU's memory that claims may take together."""
MOST_AT_ONCE: Final = 5
"""Claims that may share one GPU."""
TAIL: Final = 30
"""Lines of a log that a failure shows."""
ABOUT: Final = """
import json, torch
gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
smallest = min((gpu.total_memory for gpu in gpus), default=0) >> 30
print(json.dumps({"torch": torch.__version__, "gpus": [gpu.name for gpu in gpus], "gib": smallest}))
"""
"""A process of its own asks, so that this one keeps no memory of a GPU."""
PAIR: Final = re.compile(r"\{([^{}|]*)\|([^{}|]*)\}")


class Engines:
    """Environments of the engines.

    Args:
        paths: Folders with an engine's packages.
        pythons: Interpreters of engines, where they are not this one.
    """

    def __init__(self, paths: dict[str, str], pythons: dict[str, str]) -> None:
        self._paths, self._pythons = paths, pythons
        self._found = {"": True}

    def python(self, engine: str) -> str:
        return self._pythons.get(engine, sys.executable)

    def environment(self, engine: str) -> dict[str, str]:
        parts = [self._paths.get(engine, ""), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        sites = {f"SITE_{name.upper()}": path for name, path in self._paths.items()}
        return sites | {"PYTHONPATH": os.pathsep.join(filter(None, parts))}

    def is_there(self, engine: str) -> bool:
        """Return whether ``engine`` is installed."""
        if engine not in self._found:
            code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
            command, environment = [self.python(engine), "-c", code], os.environ | self.environment(engine)
            self._found[engine] = subprocess.run(command, env=environment, check=False).returncode == 0
        return self._found[engine]


@dataclass
class Running:
    """A claim that runs."""

    debt: Debt
    gpus: list[int]
    process: subprocess.Popen[bytes]
    began: float
    deadline: float


@dataclass
class Runner:
    """Starts claims where there is room, and ends those that take too long.

    Args:
        options: The command line.
        num_gpus: GPUs of this host; on a CPU 1, or 2 with ``--tiny``.
        engines: Where engines are installed.
    """

    options: argparse.Namespace
    num_gpus: int
    engines: Engines
    ends: float = 0.0
    running: list[Running] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, debts: Sequence[Debt]) -> None:
        """Run all of ``debts``, or as many as the budget allows."""
        self.ends, waiting = time.monotonic() + self.options.budget, list(debts)
        try:
            while waiting or self.running:
                self._collect()
                while debt := self._next(waiting):
                    waiting.remove(debt)
                    if reason := self._reason_against(debt):
                        self._note(Outcome(debt.name, "not run", reason=reason))
                    else:
                        self._start(debt)
                time.sleep(0.2)
        finally:
            for each in self.running:
                os.killpg(each.process.pid, signal.SIGKILL)

    def _next(self, waiting: Sequence[Debt]) -> Debt | None:
        """Return the first that can start, or never will; one that needs all GPUs holds up those behind it."""
        for debt in waiting:
            if self._reason_against(debt) or self._room(debt):
                return debt
            if debt.gpus > 1:
                return None
        return None

    def _room(self, debt: Debt) -> list[int]:
        """Return the GPUs that ``debt`` can start on now."""
        free = []
        for gpu in range(self.num_gpus):
            here = [each.debt for each in self.running if gpu in each.gpus]
            is_alone = debt.is_timed or debt.gpus > 1 or any(other.is_timed or other.gpus > 1 for other in here)
            gib = sum(other.gib for other in [*here, debt])
            fits = gib <= SHARED * self.options.about["gib"] and len(here) < MOST_AT_ONCE
            if not here or (fits and not is_alone):
                free.append((len(here), gpu))
        return [gpu for _, gpu in sorted(free)[: debt.gpus]] if len(free) >= debt.gpus else []

    def _reason_against(self, debt: Debt) -> str:
        """Return why ``debt`` cannot run at all, or nothing."""
        seconds_left = self.ends - time.monotonic()
        if debt.gpus > self.num_gpus:
            return f"it needs {debt.gpus} GPUs"
        if seconds_left < debt.seconds:
            return f"it takes about {debt.seconds} s, and {seconds_left:.0f} s were left"
        return "" if self.engines.is_there(debt.engine) else f"{debt.engine} is not installed here"

    def _start(self, debt: Debt) -> None:
        gpus, now, folder = self._room(debt), time.monotonic(), self.options.out / debt.name
        folder.mkdir(parents=True, exist_ok=True)
        lines = " && ".join(
            shlex.join(command)
            for command in commands_of(debt, folder, self.engines.python(debt.engine), self.options.tiny)
        )
        environment = os.environ | self.engines.environment(debt.engine) | debt.environment
        given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        names = given if len(given) == self.num_gpus else [str(gpu) for gpu in range(self.num_gpus)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)
        with (self.options.out / f"{debt.name}.log").open("wb") as log:
            log.write(f"# {lines}\n".encode())
            log.flush()
            process = subprocess.Popen(
                ["bash", "-c", lines], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.running.append(Running(debt, gpus, process, now, min(now + 2 * debt.seconds + 60, self.ends)))
        print(f"{debt.name}: starts on {gpus}", flush=True)

    def _collect(self) -> None:
        for each in list(self.running):
            code, now = each.process.poll(), time.monotonic()
            if code is None and now < each.deadline:
                continue
            with contextlib.suppress(ProcessLookupError):  # nothing is left of it
                os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()
            self.running.remove(each)
            log = self.options.out / f"{each.debt.name}.log"
            result = "timed out" if code is None else "failed" if code else "ran"
            self._note(Outcome.of_log(each.debt.name, result, now - each.began, log.read_text(errors="replace")))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        print(f"{outcome.name}: {outcome.result} {outcome.reason} ({outcome.seconds:.0f} s)", flush=True)
        if outcome.result in ("failed", "timed out"):
            print("\n".join(outcome.tail[-TAIL:]), flush=True)
        kept = {name: asdict(each) for name, each in self.outcomes.items()}
        content = json.dumps({"about": self.options.about, "outcomes": kept}, indent=1)
        (self.options.out / "debts.json").write_text(content)
        (self.options.out / "debts.md").write_text(markdown(DEBTS, *read_outcomes([self.options.out])))


def commands_of(debt: Debt, folder: Path, python: str, is_tiny: bool) -> list[list[str]]:
    """Return the commands of ``debt`` with its interpreter, its folder, and sizes for GPUs or tiny ones."""
    return [
        [
            PAIR.sub(r"\2" if is_tiny else r"\1", word).replace("{python}", python).replace("{out}", str(folder))
            for word in command
        ]
        for command in debt.commands
    ]


def about_here(is_tiny: bool) -> dict[str, Any]:
    """Return versions, GPUs, date and commit."""
    answer = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, check=True).stdout
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return json.loads(answer.splitlines()[-1]) | {"date": time.strftime("%Y-%m-%d"), "commit": commit, "tiny": is_tiny}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print names, seconds and claims, and run nothing")
    parser.add_argument("--table", nargs="+", type=Path, metavar="OUT", help="print what such folders hold")
    parser.add_argument("--only", nargs="+", choices=DEBTS, metavar="NAME", help="these, in this order")
    parser.add_argument("--out", type=Path, default=Path("gpu-debts"), help="folder of outcomes and logs")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="end all after so many seconds")
    parser.add_argument("--path", nargs="*", default=[], metavar="ENGINE=PATH", help="of its packages")
    parser.add_argument("--python", nargs="*", default=[], metavar="ENGINE=PATH", help="of its interpreter")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the commands on a CPU")
    options = parser.parse_args()
    if options.list:
        for debt in DEBTS.values():
            print(f"{debt.name:24} {debt.gpus} GPU{'s' * (debt.gpus > 1):1} {debt.seconds:4} s  {debt.claim}")
        return
    if options.table:
        print(markdown(DEBTS, *read_outcomes(options.table)))
        return
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended too
    options.about = about_here(options.tiny)
    print(options.about, flush=True)
    num_gpus = len(options.about["gpus"]) or (2 if options.tiny else 1)
    engines = Engines(*(dict(pair.split("=", 1) for pair in pairs) for pairs in (options.path, options.python)))
    Runner(options, num_gpus, engines).run([DEBTS[name] for name in options.only or DEBTS])


if __name__ == "__main__":
    main()
