"""TorchTitan's models pass the checks of every trainer."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks
from rlplug_devkit import TrainerConformance
from rlplug_trainer_titan import TorchTitan

from rlplug.types import MeshSizes

pytestmark = pytest.mark.kit


def nightly(*sizes: int) -> Any:
    return pytest.param(MeshSizes(*sizes), marks=pytest.mark.nightly)


class TestTorchTitan(TrainerConformance):
    models = ("llama3", "qwen3")
    meshes = (
        MeshSizes(1, 1, 1, 2),
        *(nightly(1, 1, 1, 1), nightly(1, 2, 1, 1), nightly(2, 1, 1, 1), nightly(1, 2, 1, 2)),
    )

    def make_trainer(self) -> TorchTitan:
        return TorchTitan()

    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)


@pytest.mark.nightly
class TestOnOtherModels(TestTorchTitan):
    models = ("tied_llama", "qwen3_moe")
    meshes = (*TestTorchTitan.meshes[1:], TestTorchTitan.meshes[0])  # the first must take all models


@pytest.mark.nightly
class TestExpertParallelism(TestTorchTitan):
    models = ("qwen3_moe",)
    meshes = (MeshSizes(1, 2, 1, 1), MeshSizes(1, 1, 1, 2))

    def make_trainer(self) -> TorchTitan:
        return TorchTitan(expert=2)
