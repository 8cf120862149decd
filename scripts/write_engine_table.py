"""Writes the table in docs/rollout-engines.md: what each engine claims, and where the conformance kit last passed.

``python scripts/write_engine_table.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the table is not what the code and docs/engine_kits.yaml say. What engines can do comes from their ``capabilities``,
where the kit ran from that file.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeAlias
from unittest.mock import patch

import yaml
from distributions import ROOT, all_distributions, plugin_distributions
from written_files import with_table, write_or_check

PAGE: Final = ROOT / "docs" / "rollout-engines.md"
KITS: Final = ROOT / "docs" / "engine_kits.yaml"
DISTRIBUTIONS: Final = tuple(distribution.name for distribution in all_distributions())
"""Whose engines are described; other plugins may be installed where this runs."""
BEGIN: Final = "<!-- Written by scripts/write_engine_table.py: change docs/engine_kits.yaml, then run `make docs`. -->"
CI: Final = "CI"
NOTHING: Final = "-"

WORDS: Final = {
    "colocated": "generates on the trainer's devices",
    "disaggregated": "generates on devices of its own",
    "logprobs": "returns the logprobs of the tokens that it sampled",
    "sleep": "gives GPU memory back between rollouts",
    "restart": "starts again after a fault, and the run goes on",
    "streaming": "takes requests one at a time, and aborts them",
    "in_flight_update": "takes weights while requests run",
    "fp8_refit": "takes weights in FP8",
    "multi_turn": "keeps a conversation's cache between turns",
    "tensor_parallel": "splits one model over several devices",
    "routed_experts": "returns the experts that its routers chose",
    "adapters": "serves low-rank adapters beside weights that it gets once",
    "stop_strings": "ends a completion at a stop string by itself; others are cut there",
}
"""The fields of ``EngineCapabilities``, as a user would say them."""

Claims: TypeAlias = Mapping[str, Mapping[str, bool]]
"""What each engine class claims: the fields of its ``capabilities``, by its name."""


@dataclass(frozen=True)
class Run:
    """One run of the conformance kit, as docs/engine_kits.yaml has it; the comment there says what the fields mean."""

    hardware: str
    version: str
    source: str
    date: datetime.date | None = None
    passed: int | None = None
    not_applicable: int | None = None
    left: str | None = None
    is_double: bool = False
    fp8: bool = False


Kits: TypeAlias = Mapping[str, Sequence[Run]]
"""The runs of each engine, newest first."""


def claims(on_gpu: bool) -> dict[str, dict[str, bool]]:
    """Return what the installed engines claim where there is a GPU, or none.

    Call it in a process of its own: some plugins look for a GPU once, when they are imported, so it imports them anew.
    """
    import torch

    from rlplug.plugin_manager import forget_plugins, plugins

    packages = {package for distribution in plugin_distributions() for package in distribution.packages}
    for module in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[module]
    forget_plugins()
    with patch.object(torch.cuda, "is_available", lambda: on_gpu):
        registered = plugins().registry.by_distribution()
        engines = [r for name in DISTRIBUTIONS for r in registered.get(name, []) if r.kind == "rollouts"]
        return {engine.name: asdict(engine.factory.capabilities) for engine in engines}  # type: ignore[attr-defined]


def claims_by_device() -> tuple[Claims, Claims]:
    """Return what engines claim on a GPU and on a CPU, whichever this machine has."""
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        on_gpu, on_cpu = pool.map(claims, (True, False))
    return on_gpu, on_cpu


def read_kits(file: Path) -> Kits:
    """Return the runs of the kit that ``file`` lists.

    Raises:
        SystemExit: A run has a key that there is not, or lacks one.
    """
    kits: dict[str, list[Run]] = {}
    for engine, runs in yaml.safe_load(file.read_text()).items():
        try:
            kits[engine] = [Run(**run) for run in runs]
        except TypeError as error:
            raise SystemExit(f"{file}, {engine}: {error}") from error
    return kits


def table(on_gpu: Claims, on_cpu: Claims, kits: Kits, file: Path = KITS) -> str:
    """Return the table.

    Raises:
        SystemExit: An engine has no entry in ``file``, an entry has no engine, or a capability has no words.
    """
    if unlisted := [engine for engine in on_gpu if engine not in kits]:
        raise SystemExit(f"{file} lacks {', '.join(unlisted)}: say where the conformance kit ran, or [] if nowhere.")
    if absent := [engine for engine in kits if engine not in on_gpu]:
        raise SystemExit(f"{file} has {', '.join(absent)}, which no installed plugin registers.")
    if wordless := {field for claimed in on_gpu.values() for field in claimed} - WORDS.keys():
        raise SystemExit(f"{Path(__file__).name} has no words for {', '.join(sorted(wordless))}: add them to WORDS.")
    rows = [["what", *(f"`{engine}`" for engine in kits)]]
    for field in next(iter(on_gpu.values())):
        cells = [_claim(on_gpu[engine][field], on_cpu[engine][field]) for engine in kits]
        rows.append([f"{WORDS[field]} (`{field}`)", *cells])
    passes = {engine: next((run for run in runs if run.left is None), None) for engine, runs in kits.items()}
    rows += [
        ["**the kit last passed on**", *(_place(run, kits[engine]) for engine, run in passes.items())],
        ["with", *(NOTHING if run is None else run.version for run in passes.values())],
        ["date", *(NOTHING if run is None else _date(run) for run in passes.values())],
        ["its checks of FP8", *(_fp8(on_gpu[engine], runs) for engine, runs in kits.items())],
    ]
    header, *lines = [f"| {' | '.join(row)} |" for row in rows]
    rule = "|---" * len(rows[0]) + "|"
    return "\n".join([header, rule, *lines])


def _claim(on_gpu: bool, on_cpu: bool) -> str:
    words = {True: "yes", False: "no"}
    return words[on_gpu] if on_gpu == on_cpu else f"{words[on_gpu]}; on a CPU {words[on_cpu]}"


def _place(run: Run | None, runs: Sequence[Run]) -> str:
    if run is None:
        return "never as a whole" if runs else "never run"
    return f"never on the engine itself; on a double of it, {run.hardware}" if run.is_double else run.hardware


def _date(run: Run) -> str:
    return "CI" if run.source == CI else str(run.date)


def _fp8(claimed: Mapping[str, bool], runs: Sequence[Run]) -> str:
    if not claimed["fp8_refit"]:
        return "not claimed"
    run = next((run for run in runs if run.fp8), None)
    if run is None:
        return "not run yet"
    return f"passed, {'on the double' if run.is_double else run.hardware}"


def main(arguments: Sequence[str] | None = None) -> int:
    def made(page: str) -> str:
        return with_table(page, BEGIN, table(*claims_by_device(), read_kits(KITS)))

    return write_or_check(__doc__, PAGE, made, arguments)


if __name__ == "__main__":
    sys.exit(main())
