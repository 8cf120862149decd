"""Checks on trainers with a mistake each, which ``test_trainer_sabotage.py`` runs."""

from __future__ import annotations

from typing import ClassVar

import broken_trainers
import hasty_trainers
from ranks import run_ranks
from rlplug_devkit import TrainerConformance
from rlplug_devkit.trainers.networks import NetworkChecks, RefusalChecks

from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.types import MeshSizes


class OneRank:
    models = ("llama",)
    meshes = (MeshSizes(1, 1, 1, 1),)

    def run_ranks(self, command: list[str], world_size: int) -> None:
        run_ranks(command, world_size)


class Sabotaged(OneRank, TrainerConformance):
    trainer: ClassVar[type[TransformersTrainer]]

    def make_trainer(self) -> TransformersTrainer:
        trainer = self.trainer()
        if len(self.meshes) == 1:
            trainer.claims = type(trainer.claims)()  # no axes, on which one rank shows nothing
        return trainer


class TestLeaks(Sabotaged):
    trainer = broken_trainers.LeaksBetweenSequences


class TestPadding(Sabotaged):
    trainer = broken_trainers.TrainsThePadding


class TestAverages(Sabotaged):
    trainer = broken_trainers.AveragesOverTokens


class TestNoise(Sabotaged):
    trainer = hasty_trainers.KeepsItsDropout


class TestMissingName(Sabotaged):
    trainer = broken_trainers.DropsAName


class TestTied(Sabotaged):
    models = ("tied_llama",)
    trainer = broken_trainers.SendsTiedEndsTwice


class TestKeys(Sabotaged):
    trainer = broken_trainers.SwapsKeysAndValues


class TestKeysBothWays(Sabotaged):
    trainer = broken_trainers.SwapsKeysAndValuesBothWays


class TestQueries(Sabotaged):
    trainer = broken_trainers.PermutesRowsOfQueries


class TestGenerationConfig(Sabotaged):
    trainer = broken_trainers.LosesTheGenerationConfig


class TestCareless(Sabotaged):
    trainer = broken_trainers.Careless


class TestCarelessOnRanks(Sabotaged):
    meshes = (MeshSizes(1, 2, 1, 1), MeshSizes(1, 1, 1, 2), MeshSizes(2, 1, 1, 1))
    trainer = broken_trainers.CarelessOnRanks


class TestOnTheHost(OneRank, NetworkChecks):
    def make_trainer(self) -> TransformersTrainer:
        return broken_trainers.BuildsOnTheHost()


class TestClosed(RefusalChecks):
    models = ("llama",)

    def make_trainer(self) -> TransformersTrainer:
        return broken_trainers.Closed()
