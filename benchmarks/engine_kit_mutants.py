"""Mutants of ``HFRollout``, and how many of them the kit of engines catches.

    python -m benchmarks.engine_kit_mutants --kind engine --most 60 --out survivors.json

As ``algorithm_kit_mutants``: each mutant is a class or function with one small change, and the checks run in this
process, in pytest's order, until the first that fails. What HFRollout takes from other modules has mutants too.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from rlplug_devkit import EngineConformance
from rlplug_devkit.claims import claim_of
from rlplug_devkit.engines.bench import Bench
from rlplug_devkit.process_state import return_blocks_when_freed

from benchmarks.algorithm_kit_mutants import is_of_a_message
from benchmarks.mutant_checks import first_failure
from benchmarks.task_kit_checks import Subject
from benchmarks.task_kit_mutants import Site, main

FOLDER: Final = tempfile.TemporaryDirectory(prefix="engine-mutants-")
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "rlplug.rollout.context_limit": ("max_completion_tokens",),
    "rlplug.rollout.seeded_sampler": ("SeededSampler",),
    "rlplug.rollout.routed_experts": ("RouterRecorder",),
    "rlplug.rollout.turns.stop_strings": ("StopStrings",),
    "rlplug.rollout.hf_engine": ("HFRollout", "_Stop", "_Sampler", "_ProgressCounter"),
}
IMPORTED_LATE: Final = ("rlplug.rollout.routed_experts", "rlplug.rollout.turns.stop_strings")
"""Modules that HFRollout imports in its methods, which must find the parts with the change there."""


def engine(made: Mapping[str, Any]) -> type:
    """Return the kit of HFRollout, of which some part may have a change."""
    for place in IMPORTED_LATE:
        for name in PARTS[place]:
            setattr(importlib.import_module(place), name, made[name])
    return type("Checks", (EngineConformance,), {"make_engine": lambda _: made["HFRollout"]()})


def killed_by(checks: Any) -> str | None:
    """Return the first check that fails, or ``None``; all have one bench, as in a test class."""
    try:
        bench = Bench(checks()._settings(Path(FOLDER.name)))
    except Exception as error:  # noqa: BLE001 - the change broke the constructor
        return f"its constructor: {type(error).__name__}"

    def applies(check: Any) -> bool:
        return claim_of(check).fits(bench.capabilities)

    try:
        return first_failure(checks, {"bench": bench}, applies=applies)
    finally:
        try:
            bench.discard()
        except Exception:  # noqa: BLE001 - of a mutant that was killed
            bench._engine = None


def _is_drawn(site: Site) -> bool:
    return not is_of_a_message(site)


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    return_blocks_when_freed(patch)
    main(__doc__, {"engine": [Subject("HFRollout", PARTS, engine)]}, killed_by, _is_drawn)
