"""Starts the processes of a distributed test, and runs a trainer on them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked import ForkedProcess, free_port, torchrun_variables


def run_ranks(
    command: Sequence[str], world_size: int, timeout: float = 600, env: Mapping[str, str] | None = None
) -> list[str]:
    """Run a script once per rank, with torchrun's variables and those of ``env``, and return what each printed."""
    port = free_port()
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # pytest's: the script imports this module
    ranks = [
        ForkedProcess(
            [sys.executable, *command],
            env=os.environ | path | torchrun_variables(rank, world_size, port) | dict(env or {}),
            separate_errors=True,
        )
        for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.wait(deadline - time.monotonic())
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(rank.stdout + rank.stderr for rank in ranks)
    return [rank.stdout for rank in ranks]


def fit_and_save(worker: Any, folder: Path, world_size: int) -> None:
    """Let a rank's ``worker``, a module, train for one batch; rank 0 writes its ``results`` to ``results.pt``."""
    import torch  # here, since test processes without ranks need none of these
    from lightning.pytorch import Trainer

    from rlplug.distributed.strategy import RLFSDP2Strategy

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
