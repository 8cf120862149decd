"""Base class of the checks of trainers: settings, which a subclass overrides, parameters, and the shared bench."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from transformers import PretrainedConfig

from rlplug.distributed.mesh import AXES
from rlplug.interfaces.trainer import ModelTrainer
from rlplug.types import MeshSizes
from rlplug_devkit.claims import ConformanceReport
from rlplug_devkit.kit import Kit
from rlplug_devkit.trainers.bench import TrainerBench
from rlplug_devkit.trainers.cases import TINY_MODELS, mesh_name, meshes_of

EVERY_TRAINER = "every trainer"


class TrainerChecks(Kit):
    """Settings of a trainer under test. A subclass must override ``make_trainer``, and may override the rest.

    Attributes:
        models: Names of the models to check: of ``TINY_MODELS``, or others that ``model_config`` returns.
        meshes: ``MeshSizes``, or ``pytest.param`` of them; ``None`` for those of ``meshes_of``: one rank, and two on
            each axis that the trainer claims.
        tolerance: Largest difference of a logprob from transformers', in nats.
        gradient_tolerance: Largest difference of a gradient from transformers', as a share of the largest entry of the
            same tensor.
    """

    models: ClassVar[Sequence[str]] = ("llama3", "tied_llama", "qwen3")
    meshes: ClassVar[Sequence[Any] | None] = None
    tolerance: ClassVar[float] = 1e-5
    gradient_tolerance: ClassVar[float] = 1e-4

    pytestmark = pytest.mark.timeout(600)  # of pytest-timeout: a rank may wait for ever
    _bench: ClassVar[TrainerBench | None] = None

    def make_trainer(self) -> ModelTrainer:
        """Return the trainer. Its class must lie in a module that other processes can import: ranks unpickle it."""
        raise NotImplementedError(f"{type(self).__name__}.make_trainer must return the trainer to test")

    def model_config(self, model: str) -> PretrainedConfig:
        """Return the configuration of one of ``models``; the kit draws its weights."""
        return TINY_MODELS[model]

    def run_ranks(self, command: list[str], world_size: int) -> None:
        """Run ``python *command`` once per rank, with torchrun's variables; raise with the output where one fails."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, *torchrun, *command], env=os.environ | path, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each check that asks for them every model and every mesh."""
        if "model" in metafunc.fixturenames:
            metafunc.parametrize("model", self.models)
        if "mesh" in metafunc.fixturenames:
            meshes = self._meshes(self.make_trainer())
            named = [pytest.param(mesh_name(_sizes(mesh)), marks=getattr(mesh, "marks", ())) for mesh in meshes]
            metafunc.parametrize("mesh", named)

    def _meshes(self, trainer: ModelTrainer) -> Sequence[Any]:
        return meshes_of(trainer.claims) if self.meshes is None else self.meshes

    @classmethod
    def teardown_class(cls) -> None:
        cls._bench = None

    @pytest.fixture(autouse=True)
    def bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainerBench:
        """Return the class's bench."""
        cls = type(self)
        if cls._bench is None:
            trainer = self.make_trainer()
            models = {model: self.model_config(model) for model in self.models}
            meshes = [_sizes(mesh) for mesh in self._meshes(trainer)]
            folder = tmp_path_factory.mktemp(type(trainer).__name__)
            cls._bench = TrainerBench(trainer, models, meshes, self.run_ranks, folder)
        self._report(request, cls._bench)
        return cls._bench

    def _report(self, request: pytest.FixtureRequest, bench: TrainerBench) -> None:
        """Add the check to the report under the axis that it is about."""
        callspec = getattr(request.node, "callspec", None)
        mesh = "" if callspec is None else callspec.params.get("mesh", "")
        axes: dict[str, bool | None] = {axis: axis in bench.trainer.claims.axes for axis in AXES if axis != "shard"}
        tests = request.node.nodeid.rpartition("::")[0]
        ConformanceReport.of(request.config).include(tests, bench.name, {EVERY_TRAINER: None} | axes)
        claim = next((axis for axis in axes if axis in mesh), EVERY_TRAINER)
        request.node.user_properties.append(("rlplug_claim", claim))


def _sizes(mesh: Any) -> MeshSizes:
    sizes: MeshSizes = mesh if isinstance(mesh, MeshSizes) else mesh.values[0]
    return sizes
