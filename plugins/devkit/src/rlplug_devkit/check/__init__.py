"""``rlplug check``: the kits that are for what an installed package brings, and a record of what held."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlplug.cli.command_parser import CommandParser
from rlplug.errors import ConfigError
from rlplug.observability.terminal import make_table, say, show

if TYPE_CHECKING:
    from rlplug_devkit.check.results import Result
    from rlplug_devkit.check.subjects import Package, Subject

FORMAT: Final = 1
"""Of the record: rises when a key changes its meaning."""
VERSIONS: Final = ("rlplug", "rlplug-devkit", "torch", "transformers", "numpy", "pytest")
DESCRIPTION: Final = """\
Run the conformance kits of all that an installed package registers, and write a record.

The exit status is 0 when every promise that applies was held, and 1 when one was not or could not be checked. A package
says in its conformance.yaml how the kits make its objects, by class name:

    MyAlgorithm:
      init_args: {clip: 0.1}
      settings: {zero_advantages: step}
"""


def make_parser() -> CommandParser:
    parser = CommandParser("check", "PACKAGE [options]", DESCRIPTION)
    parser.add_argument("package", help="a distribution, the name of its plugin, or its module")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="in place of the package's conformance.yaml")
    parser.add_argument(
        "--tests", type=Path, action="append", default=[], metavar="FILE", help="the author's own tests of kits, too"
    )
    parser.add_argument("--only", action="append", default=[], metavar="CLASS", help="check this class alone")
    parser.add_argument(
        "--record", type=Path, default=Path("rlplug-check.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes at once; default: one for each GPU, 2 on a CPU"
    )
    parser.add_argument("--limit", type=float, default=3600.0, metavar="S", help="seconds for all; 3600 by default")
    parser.add_argument("--verbose", action="store_true", help="show promises that do not apply, too")
    return parser


def check_command(arguments: list[str]) -> int:
    """Run the conformance kits of what an installed PACKAGE brings: a table, a record, an exit status.

    Raises:
        ConfigError: No plugin has that name, or its settings are not as they must be.
    """
    options = make_parser().parse_args(arguments)
    from rlplug_devkit.check.runs import run_kits
    from rlplug_devkit.check.subjects import package_of

    package = package_of(options.package, options.settings)
    unknown = sorted({*options.only} - {subject.name for subject in package.subjects})
    if unknown:
        raise ConfigError(f"check {options.package}: --only {unknown[0]} is not in {package.distribution}.")
    missing = [file for file in options.tests if not file.is_file()]
    if missing:
        raise ConfigError(f"check {options.package}: --tests {missing[0]} is no file.")
    subjects = [subject for subject in package.subjects if not options.only or subject.name in options.only]
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="rlplug-check-") as folder:
        results = run_kits(
            [subject for subject in subjects if not subject.problem],
            [file.resolve() for file in options.tests],
            Path(folder),
            options.jobs,
            options.limit,
        )
    results += _problems(subjects)
    _print(package, results, is_verbose=options.verbose)
    record = make_record(package, subjects, results, began)
    options.record.write_text(json.dumps(record, indent=2) + "\n")
    say(f"{record['conclusion']}: {_counts(results)}. The record is {options.record}.")
    return 0 if record["conclusion"] == "held" else 1


def _problems(subjects: Sequence[Subject]) -> list[Result]:
    from rlplug_devkit.check.results import Result
    from rlplug_devkit.check.subjects import class_name

    return [
        Result(class_name(subject), "can be made", "failed", 0.0, subject.problem)
        for subject in subjects
        if subject.problem
    ]


def make_record(
    package: Package, subjects: Sequence[Subject], results: Sequence[Result], began: float
) -> dict[str, Any]:
    """Return what certification reads: what was checked, with which versions, and what held."""
    from rlplug_devkit.check.subjects import class_name

    kinds = {class_name(subject): subject.kind for subject in subjects}
    is_held = bool(results) and all(result.held in ("held", "does not apply") for result in results)
    return {
        "format": FORMAT,
        "distribution": package.distribution,
        "version": package.version,
        "conclusion": "held" if is_held else "not held",
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.time() - began, 1),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "gpus": _gpus()},
        "not_checked": list(package.unchecked),
        "results": [
            {
                "kind": kinds.get(result.subject, ""),
                "class": result.subject.removeprefix("Test"),
                "check": result.check,
                "held": result.held,
                "seconds": round(result.seconds, 3),
                "reason": result.reason,
            }
            for result in results
        ],
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _print(package: Package, results: Sequence[Result], is_verbose: bool) -> None:
    """Print a table for each class, and what failed in full below it."""
    from rlplug_devkit.claims import words_of

    of_subject: dict[str, list[Result]] = {}
    for result in results:
        of_subject.setdefault(result.subject, []).append(result)
    for subject, own in of_subject.items():
        shown = [result for result in own if is_verbose or result.held != "does not apply"]
        rows = [(words_of(result.check), result.held, f"{result.seconds:.2f}") for result in shown]
        total = ("all", _counts(own), f"{sum(result.seconds for result in own):.2f}")
        title = f"{subject.removeprefix('Test')} of {package.distribution} {package.version}".removeprefix(" of ")
        show(make_table(("promise", "held", "seconds"), [*rows, total], title, num_totals=1))
        for result in own:
            if result.held in ("failed", "skipped"):
                say((words_of(result.check), "bold"), f" {result.held}: {result.reason}", wraps=True)
    if package.unchecked:
        say(f"no kit is for {', '.join(package.unchecked)}")
    if not of_subject:
        say(f"{package.distribution} registers nothing that a kit checks")


def _counts(results: Sequence[Result]) -> str:
    counts: Mapping[str, int] = {
        held: sum(result.held == held for result in results) for held in ("held", "failed", "skipped", "does not apply")
    }
    words = {"held": "held", "failed": "failed", "skipped": "skipped", "does not apply": "not applied"}
    return ", ".join(f"{count} {words[held]}" for held, count in counts.items() if count) or "nothing checked"
