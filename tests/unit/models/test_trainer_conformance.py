"""The trainer of the core passes the checks of every trainer."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from rlplug_devkit import TrainerConformance
from rlplug_devkit.trainers.cases import meshes_of

from rlplug.models.transformers_trainer import TransformersTrainer


class TestTransformersTrainer(TrainerConformance):
    models = ("qwen3",)
    meshes = meshes_of(TransformersTrainer.claims)[:1]  # of one rank

    def make_trainer(self) -> TransformersTrainer:
        return TransformersTrainer()

    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)


@pytest.mark.nightly
class TestOnTwoRanks(TestTransformersTrainer):
    meshes = meshes_of(TransformersTrainer.claims)


@pytest.mark.nightly
class TestOnOtherModels(TestOnTwoRanks):
    models = ("llama3", "tied_llama", "qwen3_moe")
