"""The trainer of hybrid models passes the checks of every trainer, on a delta net and on short convolutions."""

from __future__ import annotations

from typing import Any

import pytest
from hybrid_models import config_of
from ranks import run_ranks
from rlplug_devkit import TrainerConformance
from rlplug_devkit.trainers.cases import PADDING, VOCABULARY, meshes_of
from rlplug_hybrids import HybridTrainer, PaddedTrainer

from rlplug.models.transformers_trainer import TransformersTrainer


class TestHybridTrainer(TrainerConformance):
    """It alone catches weights that a sync, an export or a resume of such layers loses."""

    models = ("lfm2",)
    meshes = meshes_of(HybridTrainer.claims)[:1]  # of one rank

    def make_trainer(self) -> TransformersTrainer:
        return HybridTrainer()

    def model_config(self, model: str) -> Any:
        return config_of(model, vocab_size=VOCABULARY, pad_token_id=PADDING)

    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)


@pytest.mark.nightly
class TestPaddedTrainer(TestHybridTrainer):
    models = ("mamba2",)
    meshes = meshes_of(PaddedTrainer.claims)

    def make_trainer(self) -> PaddedTrainer:
        return PaddedTrainer()


@pytest.mark.nightly
class TestOnTwoRanks(TestHybridTrainer):
    models = ("lfm2", "qwen3_next", "nemotron_h")
    meshes = meshes_of(HybridTrainer.claims)
