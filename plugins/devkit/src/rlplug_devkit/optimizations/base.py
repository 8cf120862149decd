"""Base class of the checks of optimizations: settings, which a subclass overrides, parameters, and the shared bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from rlplug.interfaces.optimization import Optimization
from rlplug_devkit.claims import ConformanceReport
from rlplug_devkit.kit import Kit
from rlplug_devkit.optimizations.bench import MESHES, OptimizationBench
from rlplug_devkit.trainers.base import TrainerChecks

EVERY_OPTIMIZATION = "every check"


class OptimizationChecks(Kit):
    """Settings of optimizations under test. A subclass must override ``make_optimizations``, and may override the rest.

    Attributes:
        models: Names of the models to check, of ``TINY_MODELS``. By default one with an output layer of its own, and
            one with tied embeddings, two kinds of layers and norms of another form.
        meshes: ``1 rank`` and ``2 ranks``, or one of them.
        changes_of_process: Settings of the process that the optimizations have to change, by the names that the check
            uses.
        with_partner: Whether variants are checked with recomputed blocks too; false where both conflict.
        tolerance: Largest difference of logprobs and entropies from the plain path's, as a share of the largest.
        gradient_tolerance: Largest difference of a gradient or a weight from the plain path's, as a share of the
            largest of its tensor.
    """

    models: ClassVar[Sequence[str]] = ("llama", "gemma3")
    meshes: ClassVar[Sequence[str]] = tuple(MESHES)
    changes_of_process: ClassVar[frozenset[str]] = frozenset()
    with_partner: ClassVar[bool] = True
    tolerance: ClassVar[float] = 1e-5
    gradient_tolerance: ClassVar[float] = 1e-4
    pytestmark = pytest.mark.timeout(600)  # of pytest-timeout: a rank may wait for ever
    _bench: ClassVar[OptimizationBench | None] = None

    def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
        """Return the optimizations to apply together, by a name of your own; classes must be importable by ranks."""
        raise NotImplementedError(f"{type(self).__name__}.make_optimizations must return what to test")

    def trains(self, name: str) -> bool:
        """Return whether the weight of this name in a checkpoint trains; one that does not must have no gradient."""
        return True

    def run_ranks(self, command: list[str], world_size: int) -> None:
        """Run ``python *command`` once per rank, with torchrun's variables; raise with the output where one fails."""
        TrainerChecks.run_ranks(self, command, world_size)  # type: ignore[arg-type]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each check that asks for them every model, mesh and variant."""
        if "model" in metafunc.fixturenames:
            metafunc.parametrize("model", self.models)
        if "mesh" in metafunc.fixturenames:
            metafunc.parametrize("mesh", self.meshes)
        if "variant" in metafunc.fixturenames:
            metafunc.parametrize("variant", list(self.make_optimizations()))

    @classmethod
    def teardown_class(cls) -> None:
        cls._bench = None

    @pytest.fixture(autouse=True)
    def bench(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OptimizationBench:
        """Return the class's bench."""
        cls = type(self)
        if cls._bench is None:
            folder = tmp_path_factory.mktemp(cls.__name__)
            cls._bench = OptimizationBench(
                self.make_optimizations(), self.models, self.with_partner, self.run_ranks, folder
            )
        tests = request.node.nodeid.rpartition("::")[0]
        ConformanceReport.of(request.config).include(tests, cls.__name__, {EVERY_OPTIMIZATION: None})
        request.node.user_properties.append(("rlplug_claim", EVERY_OPTIMIZATION))
        return cls._bench
