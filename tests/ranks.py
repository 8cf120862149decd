"""Starts the processes of a distributed test, and runs a trainer on them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from rlplug.distributed.strategy import RLFSDP2Strategy


def run_ranks(command: list[str], world_size: int) -> None:
    """Run a script once per rank, with the environment that torchrun would give it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "PYTHONPATH": os.pathsep.join(sys.path),  # pytest's: the script imports this module
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(outputs)


def fit_and_save(worker: Any, folder: Path, world_size: int) -> None:
    """Let a rank's ``worker``, a module, train for one batch; rank 0 writes its ``results`` to ``results.pt``."""
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=RLFSDP2Strategy(timeout_s=60),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(worker, train_dataloaders=torch.utils.data.DataLoader([0]))
    if trainer.is_global_zero:
        torch.save(worker.results, folder / "results.pt")
