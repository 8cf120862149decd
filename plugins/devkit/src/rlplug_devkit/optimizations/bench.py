"""Bench of the checks of optimizations: what the ranks of each mesh measured, with and without them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlplug.interfaces.optimization import Optimization
from rlplug.types import MeshSizes
from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.optimizations.partners import WITH_PARTNER, RecomputedBlocks, WrappedBlocks
from rlplug_devkit.optimizations.ranks import VariantJob, run_variants
from rlplug_devkit.tasks.calls import NOT_COMPARED
from rlplug_devkit.trainers.cases import TINY_MODELS, Case, write_model

MESHES = {"1 rank": MeshSizes(1, 1, 1, 1), "2 ranks": MeshSizes(1, 2, 1, 1)}
RunRanks = Callable[[list[str], int], None]


class OptimizationBench:
    """What a class of checks shares: each mesh's processes are started once, when the first check asks for them."""

    def __init__(
        self,
        variants: Mapping[str, Sequence[Optimization]],
        models: Sequence[str],
        partner: bool,
        run_ranks: RunRanks,
        folder: Path,
    ) -> None:
        self.variants = dict(variants)
        if partner:
            self.variants |= {
                f"{name}{WITH_PARTNER}": [WrappedBlocks(), *each, RecomputedBlocks()] for name, each in variants.items()
            }
        self._models = models
        self._run_ranks = run_ranks
        self._folder = folder
        self._outcomes: dict[tuple[str, str], dict[str, dict[str, dict[str, Any]]]] = {}
        self._failures: dict[str, str] = {}

    def outcome(self, model: str, mesh: str, variant: str, probe: str) -> dict[str, Any]:
        """Return the outcome of a probe, see :func:`run_variants`."""
        if (model, mesh) not in self._outcomes:
            self._measure(mesh)
        outcome: dict[str, Any] = self._outcomes[model, mesh][variant][probe]
        return outcome

    def value(self, model: str, mesh: str, variant: str, probe: str) -> Any:
        """Return what a probe measured; skip the check where building is refused, or an earlier probe failed."""
        outcome = self.outcome(model, mesh, variant, probe)
        built = self.outcome(model, mesh, variant, "build")
        if "refused" in built:
            pytest.skip(f"{DOES_NOT_APPLY}{variant} on {mesh}: {built['refused']}")
        if "after" in outcome:
            pytest.skip(NOT_COMPARED)
        problem = outcome.get("refused") or outcome.get("error")
        if problem:
            pytest.fail(f"{variant} raised in {probe!r} with {model} on {mesh}:\n{problem}", pytrace=False)
        return outcome["value"]

    def _measure(self, mesh: str) -> None:
        if mesh in self._failures:
            pytest.fail(self._failures[mesh], pytrace=False)
        for model in self._models:
            if not (self._folder / "models" / model).exists():
                write_model(TINY_MODELS[model], self._folder / "models" / model)
        cases = {
            model: Case(model, self._folder / "models" / model, MESHES[mesh], self._folder / mesh / model)
            for model in self._models
        }
        job = VariantJob(tuple(cases.values()), self.variants)
        try:
            if mesh == "1 rank":
                run_variants(job)
            else:
                file = self._folder / "job.pkl"
                file.write_bytes(pickle.dumps(job))
                self._run_ranks(["-m", "rlplug_devkit.optimizations", str(file)], MESHES[mesh].world_size)
        except Exception as error:  # noqa: BLE001 - a subclass may start ranks in any way
            self._failures[mesh] = f"the processes of {mesh} ended early:\n{error}"
            pytest.fail(self._failures[mesh], pytrace=False)
        self._outcomes |= {(model, mesh): torch.load(case.out / "results.pt") for model, case in cases.items()}
