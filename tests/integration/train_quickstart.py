"""The quickstart from Python, with nothing that records: ``python train_quickstart.py FOLDER`` runs in FOLDER.

It writes ``alive.json`` there: the samples in memory after each step.
"""

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from rlplug_algos.grpo import GRPO

from examples.quickstart.reward import digits_in_place
from rlplug.config import Limits
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.sources import FileSource
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import RunObserver, StepRecord, Validation
from rlplug.models.config import ModelConfig
from rlplug.module import RLModule
from rlplug.rewards import FunctionReward
from rlplug.training.batch_plan import BatchSizes
from rlplug.training.validation.config import ValidationConfig
from rlplug.types import Sample, SamplingParams

EXAMPLE = Path(__file__).parents[2] / "examples/quickstart"
NUM_STEPS = 3


class Watcher(Callback, RunObserver):
    """Notes what it sees, and how many samples are in memory between steps."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.alive: list[int] = []

    def step_ended(self, record: StepRecord) -> None:
        assert len(record.samples) == len(record.batch.ends) - 1 == 128
        assert record.timings["step"] > record.timings["update"] > 0
        self.seen.append(["step", record.step, record.metrics["reward/mean"], record.values["reward"].mean()])

    def validated(self, validation: Validation) -> None:
        self.seen.append(["validation", validation.step, validation.scores["validate/reward_mean"]])

    def on_train_batch_start(self, *args: Any) -> None:
        gc.collect()
        self.alive.append(sum(isinstance(each, Sample) for each in gc.get_objects()))


def main(folder: Path) -> None:
    os.chdir(folder)
    seed_everything(0)
    module = RLModule(
        policy=ModelConfig(path=str(EXAMPLE / "model"), init="random", dtype="float32"),
        algorithm=GRPO(),
        rewards=[FunctionReward(digits_in_place)],
        batch=BatchSizes(prompts_per_step=16, group_size=8),
        sampling=SamplingParams(max_new_tokens=4),
        optimizer=partial(torch.optim.AdamW, lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        limits=Limits(max_grad_norm=0.3),
        validation=ValidationConfig(every_n_steps=2),
        num_steps=NUM_STEPS,
    )
    data = PromptDataModule(FileSource(str(EXAMPLE / "train.jsonl")), FileSource(str(EXAMPLE / "val.jsonl")))
    watcher = Watcher()
    trainer = Trainer(
        accelerator="cpu",
        strategy=RLFSDP2Strategy(),
        callbacks=[watcher],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        max_epochs=-1,
    )
    trainer.fit(module, data)
    (folder / "seen.json").write_text(json.dumps({"seen": watcher.seen, "alive": watcher.alive}, default=float))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
