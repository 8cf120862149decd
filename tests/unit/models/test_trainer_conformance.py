"""The trainer of the core passes the checks of every trainer."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from rlplug_devkit import TrainerConformance

from rlplug.models.transformers_trainer import TransformersTrainer


class TestTransformersTrainer(TrainerConformance):
    models = ("qwen3",)

    def make_trainer(self) -> TransformersTrainer:
        return TransformersTrainer()

    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)


@pytest.mark.nightly
class TestOnOtherModels(TestTransformersTrainer):
    models = ("llama3", "tied_llama", "qwen3_moe")
