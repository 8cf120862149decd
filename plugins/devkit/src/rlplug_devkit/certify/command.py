"""``rlplug certify``: kits, a learning run and parity of an engine with a trainer, as installed, and a record of it."""

from __future__ import annotations

import dataclasses
import json
import platform
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlplug.cli.command_parser import CommandParser
from rlplug.errors import ConfigError, did_you_mean
from rlplug.observability.terminal import make_table, say, show

if TYPE_CHECKING:
    from rlplug_devkit.check.subjects import Subject
    from rlplug_devkit.reference import Tolerances

FAMILIES: Final = ("llama3", "qwen3")
OURS: Final = ("rlplug", "rlplug-devkit", "rlplug-algos")
"""Distributions whose code runs in every certification."""
DESCRIPTION: Final = """\
Certify the installed set for an engine and a trainer: for each family of models a learning run of two steps whose
engine and trainer must agree on every sampled token, before and after a weight sync; then their conformance kits, on
all GPUs.

The record is a JSON file with versions, digests of rlplug's and the plugins' code, machine, results, seconds and a
hash; a record that was changed is refused. Put it into the records folder of a plugin's package, as package data:
rlplug plugins --check and rlplug doctor of whoever installs the plugin then say whether their set is certified, or
which pip line leads to one that is. Minutes on a CPU.

    rlplug certify
    rlplug certify --engine VLLMRollout --family qwen3

The exit status is 0 when all held, and 1 when something did not; then, too, the record says what.
"""


def make_parser() -> CommandParser:
    parser = CommandParser("certify", "[options]", DESCRIPTION)
    parser.add_argument("--engine", default="HFRollout", metavar="CLASS", help="what samples; default: %(default)s")
    parser.add_argument(
        "--trainer", default="TransformersTrainer", metavar="CLASS", help="what trains; default: %(default)s"
    )
    parser.add_argument(
        "--family",
        action="append",
        metavar="NAME",
        help=f"of models, once for each; default: {' and '.join(FAMILIES)}",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="default: a name of engine, trainer, device and versions"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes at once; default: one for each GPU, 2 on a CPU"
    )
    parser.add_argument("--limit", type=float, default=7200.0, metavar="S", help="seconds for all; 7200 by default")
    return parser


def certify_command(arguments: list[str]) -> int:
    """Certify the installed set for an engine and a trainer: kits, a learning run, parity, a record.

    Raises:
        ConfigError: The engine, trainer or a family has another name, or cannot be made, or code changed meanwhile.
    """
    options = make_parser().parse_args(arguments)
    from rlplug_devkit.certify.code import digests_of
    from rlplug_devkit.certify.learning import try_learning
    from rlplug_devkit.certify.records import conclusion_of, hash_of

    families = options.family or list(FAMILIES)
    engine, trainer, distributions = _subjects(options.engine, options.trainer, families)
    began, deadline = time.time(), time.monotonic() + options.limit
    values = _header(engine, trainer, families, distributions, began)
    file = options.record or Path(_file_name(values))
    engine, tolerances = _for_device(engine, values["device"])
    say(f"certifying {engine.name} with {trainer.name} on {values['device']}: {', '.join(families)}, then kits")
    results, measured = [], {}
    for family in families:
        say(f"a learning run of {family}")
        left_s = max(deadline - time.monotonic(), 1.0)
        found, measured[family] = try_learning(engine, trainer, family, tolerances, values["device"], left_s)
        results += found
    results += _kits(engine, trainer, families, options.jobs, deadline)
    values |= {"seconds": round(time.time() - began, 1), "measured": measured, "results": results}
    values["conclusion"] = conclusion_of(results)
    if changed := [name for name, digest in digests_of(values["code"]).items() if digest != values["code"][name]]:
        raise ConfigError(
            f"certify: the code of {', '.join(changed)} changed meanwhile, so that no record says what ran."
        )
    values["sha256"] = hash_of(values)
    _print(values)
    file.write_text(json.dumps(values, indent=1) + "\n")
    say(f"{values['conclusion']}. The record is {file}.")
    return 0 if values["conclusion"] == "certified" else 1


def _subjects(engine: str, trainer: str, families: list[str]) -> tuple[Subject, Subject, set[str]]:
    """Return engine and trainer, and their distributions."""
    from rlplug_devkit.check.subjects import registered_subject
    from rlplug_devkit.trainers.cases import TINY_MODELS

    for family in families:
        if family not in TINY_MODELS:
            known = ", ".join(TINY_MODELS)
            raise ConfigError(f"certify: --family {family} is none of {known}.{did_you_mean(family, TINY_MODELS)}")
    try:
        version("rlplug-algos")
    except PackageNotFoundError:
        raise ConfigError("certify trains with GRPO: pip install rlplug-algos.") from None
    found = [registered_subject("rollouts", engine), registered_subject("trainers", trainer)]
    for subject, _ in found:
        if subject.problem:
            raise ConfigError(f"certify {subject.name}: {subject.problem}.")
    (of_engine, _), (of_trainer, _) = found
    return of_engine, of_trainer, {registration.distribution for _, registration in found}


def _header(
    engine: Subject, trainer: Subject, families: list[str], distributions: set[str], began: float
) -> dict[str, Any]:
    import torch

    from rlplug_devkit.certify.code import digests_of
    from rlplug_devkit.certify.records import FORMAT
    from rlplug_devkit.certify.versions import packages_of

    packages, others = packages_of(sorted(distributions))
    return {
        "format": FORMAT,
        "engine": engine.name,
        "trainer": trainer.name,
        "init_args": {"engine": dict(engine.init_args), "trainer": dict(trainer.init_args)},
        "families": families,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "packages": dict(packages),
        "other_packages": dict(others),
        "code": digests_of({*distributions, *OURS, *(name for name in packages if name.startswith("rlplug-"))}),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
    }


def _file_name(values: dict[str, Any]) -> str:
    libraries = [f"{name}{found}" for name, found in values["packages"].items() if not name.startswith("rlplug")]
    device = values["device"].replace(" ", "_")
    return "-".join([values["engine"], values["trainer"], device, *libraries]) + ".json"


def _for_device(engine: Subject, device: str) -> tuple[Subject, Tolerances]:
    """Return the engine with its kit's settings for a device, and the tolerances of parity there.

    In bfloat16 engine and trainer both round, the kit's reference does not: they may differ by twice as much, which is
    still a twentieth of what weights of before the sync differ by.
    """
    from rlplug_devkit.reference import BFLOAT16, FLOAT32

    if device == "cpu":
        return engine, FLOAT32
    import torch

    settings = {"dtype": torch.bfloat16, "tolerances": BFLOAT16, "seed_is_exact": False, **engine.settings}
    parity = dataclasses.replace(BFLOAT16, mean=2 * BFLOAT16.mean, max=2 * BFLOAT16.max)
    return dataclasses.replace(engine, settings=settings), parity


def _kits(
    engine: Subject, trainer: Subject, families: list[str], jobs: int | None, deadline: float
) -> list[dict[str, Any]]:
    from rlplug_devkit.check.runs import run_kits
    from rlplug_devkit.check.subjects import class_name

    own = {"models": tuple(families), **trainer.settings}
    subjects = [engine, dataclasses.replace(trainer, settings=own)]
    parts = {class_name(subject): f"kit of {subject.name}" for subject in subjects}
    with tempfile.TemporaryDirectory(prefix="rlplug-certify-") as folder:
        found = run_kits(subjects, (), Path(folder), jobs, max(deadline - time.monotonic(), 1.0))
    ran = {result.subject for result in found}
    missing = [{"part": part, "check": "start", "held": "failed"} for name, part in parts.items() if name not in ran]
    results = [
        {
            "part": parts.get(result.subject, "kits"),
            "check": result.check.removeprefix("test_"),
            "held": result.held,
            "seconds": round(result.seconds, 3),
            "reason": result.reason,
        }
        for result in found
    ]
    return results + [{**each, "seconds": 0.0, "reason": "nothing of it ran"} for each in missing]


def _print(values: dict[str, Any]) -> None:
    """Print a row for each part, and below them what did not hold."""
    from rlplug_devkit.claims import words_of

    rows = []
    for part in dict.fromkeys(result["part"] for result in values["results"]):
        own = [result for result in values["results"] if result["part"] == part]
        counts = [str(sum(result["held"] == held for result in own)) for held in ("held", "failed", "does not apply")]
        rows.append((part, *counts, f"{sum(result['seconds'] for result in own):.1f}"))
    title = f"{values['engine']} with {values['trainer']} on {values['device']}"
    show(make_table(("part", "held", "failed", "not applied", "seconds"), rows, title))
    for result in values["results"]:
        if result["held"] in ("failed", "skipped"):
            says = f" of the {result['part']} {result['held']}: {result['reason']}"
            say((words_of(result["check"]), "bold"), says, wraps=True)
