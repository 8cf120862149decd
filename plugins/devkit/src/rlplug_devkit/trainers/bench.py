"""Bench of a trainer's checks: model folders, transformers' results, and what the ranks of each mesh measured."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from rlplug.interfaces.trainer import ModelTrainer
from rlplug.types import MeshSizes
from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.trainers.cases import Case, Job, mesh_name, write_model
from rlplug_devkit.trainers.ranks import run_cases
from rlplug_devkit.trainers.reference import Reference, reference_of

INDIVISIBLE: Final = "{} of 3 heads"
"""Name of a model that two ranks of the tensor axis cannot share."""

RunRanks = Callable[[list[str], int], None]


class TrainerBench:
    """What a class of checks shares: each mesh's processes are started once, when the first check asks for them.

    Args:
        trainer: The trainer under test.
        models: Configurations of the models that it trains, by name.
        meshes: All meshes that checks may ask for.
        run_ranks: Starts processes, see :meth:`TrainerConformance.run_ranks`.
        folder: Where to write models and results.
    """

    def __init__(
        self,
        trainer: ModelTrainer,
        models: Mapping[str, PretrainedConfig],
        meshes: list[MeshSizes],
        run_ranks: RunRanks,
        folder: Path,
    ) -> None:
        self.trainer = trainer
        self.name = type(trainer).__name__
        self.models = dict(models)
        self.meshes = {mesh_name(mesh): mesh for mesh in meshes}
        self._run_ranks = run_ranks
        self._folder = folder
        self._outcomes: dict[tuple[str, str], dict[str, Any]] = {}
        self._failures: dict[int, str] = {}
        self.reference = functools.cache(self._reference)

    def _reference(self, model: str) -> Reference:
        return reference_of(self.model_folder(model))

    def model_folder(self, model: str) -> Path:
        """Return the folder of a model, written when it is first asked for."""
        folder = self._folder / "models" / model
        if not folder.exists():
            write_model(self.models[model] if model in self.models else self._indivisible()[model], folder)
        return folder

    def _indivisible(self) -> dict[str, PretrainedConfig]:
        """Return a model like the first one, with an odd number of heads and an odd width."""
        name, config = next(iter(self.models.items()))
        odd: Any = copy.deepcopy(config)
        odd.num_attention_heads = odd.num_key_value_heads = 3
        odd.hidden_size, odd.intermediate_size = 3 * odd.head_dim, 63
        return {INDIVISIBLE.format(name): odd}

    def value(self, model: str, mesh: str, probe: str) -> Any:
        """Return what a probe of ``measured.py`` found.

        The check fails where the probe raised. It is skipped where the trainer claims the mesh's axes, and refuses
        this model on them.
        """
        outcome = self.outcome(model, mesh, probe)
        if "refused" in outcome and mesh not in ("1 rank", "shard 2"):
            pytest.skip(f"{DOES_NOT_APPLY}{self.name} refuses {model} on {mesh}: {outcome['refused']}")
        problem = outcome.get("refused") or outcome.get("error")
        if problem:
            pytest.fail(f"{self.name} raised in {probe!r} with {model} on {mesh}:\n{problem}", pytrace=False)
        return outcome["value"]

    def outcome(self, model: str, mesh: str, probe: str) -> dict[str, Any]:
        """Return the outcome of a probe, see :func:`rlplug_devkit.trainers.ranks.run_cases`."""
        if (model, mesh) not in self._outcomes:
            self._measure(model, mesh)
        outcome: dict[str, Any] = self._outcomes[model, mesh][probe]
        return outcome

    def _measure(self, model: str, mesh: str) -> None:
        """Run the cases of as many ranks; a single rank runs in this process, and only the case that is asked for."""
        world_size = self.meshes[mesh].world_size
        if world_size in self._failures:
            pytest.fail(self._failures[world_size], pytrace=False)
        asked = [(model, mesh)]
        if world_size > 1:
            names = [name for name, sizes in self.meshes.items() if sizes.world_size == world_size]
            asked = [(model, name) for name in names for model in self.models]
            asked += [(model, name) for name in names if "tensor" in name for model in self._indivisible()]
        cases = {
            key: Case(key[0], self.model_folder(key[0]), self.meshes[key[1]], self._folder / key[1] / key[0])
            for key in asked
        }
        job = Job(self.trainer, tuple(cases.values()))
        if world_size == 1:
            run_cases(job)
        else:
            file = self._folder / f"job-{world_size}.pkl"
            file.write_bytes(pickle.dumps(job))
            try:
                self._run_ranks(["-m", "rlplug_devkit.trainers", str(file)], world_size)
            except Exception as error:  # noqa: BLE001 - a subclass may start ranks in any way
                self._failures[world_size] = f"the {world_size} processes of {self.name} ended early:\n{error}"
                pytest.fail(self._failures[world_size], pytrace=False)
        self._outcomes |= {key: torch.load(case.out / "results.pt") for key, case in cases.items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str, advice: str) -> None:
    """Fail unless both have the same names, and tensors that are equal bit for bit."""
    assert_close(found, expected, 0.0, what, advice)


def assert_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str, advice: str
) -> None:
    """Fail unless both have the same names, and tensors that differ by at most ``tolerance`` of the largest entry."""
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    assert not missing, f"{what}: {len(missing)} are missing, first {missing[0]!r}. {advice}"
    assert not unknown, f"{what}: {len(unknown)} are unknown, first {unknown[0]!r}. {advice}"
    wrong = {name: _difference(found[name], tensor, tolerance) for name, tensor in expected.items()}
    lines = [f"\n  {name} {difference}" for name, difference in wrong.items() if difference]
    more = f"\n  and {len(lines) - 5} more" if len(lines) > 5 else ""
    assert not lines, f"{what} differ: {advice}{''.join(lines[:5])}{more}"


def _difference(found: Tensor, expected: Tensor, tolerance: float) -> str:
    """Return in words how two tensors differ; empty where they do not."""
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)} instead of {list(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"is {found.dtype} instead of {expected.dtype}"
    largest = float(expected.float().abs().max())
    difference = float((found.float() - expected.float()).abs().max())
    if difference <= tolerance * largest:
        return ""
    return f"is off by up to {difference:.3g}, where the largest entry is {largest:.3g}"
