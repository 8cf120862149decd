"""Optimizers and schedulers whose options do not work are refused by the key, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rlplug_optims import Muon
from torch import optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlplug.errors import ConfigError
from rlplug.setup.checks.trainer import try_optimizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        (partial(optim.SGD, lr=0.1, fused=True), None, r"model\.optimizer\.init_args\.fused is true, and SGD has no"),
        (partial(optim.Adagrad, lr=0.1, fused=True), None, r"fused is true, and Adagrad has no such step.*remove it"),
        (partial(optim.Rprop, lr=0.1, foreach=True), None, r"foreach is true, and Rprop has no such step"),
        (partial(optim.AdamW, lr=-1.0), None, r"model\.optimizer refuses its options: Invalid learning rate: -1"),
        (optim.LBFGS, None, r"model\.optimizer refuses its options: .*closure"),
        (optim.AdamW, optim.lr_scheduler.ReduceLROnPlateau, r"model\.lr_scheduler is ReduceLROnPlateau, which waits"),
        (optim.AdamW, partial(optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 - step)), "division by zero"),
        (optim.AdamW, partial(optim.lr_scheduler.StepLR, step=1), r"model\.lr_scheduler refuses its options: .*'step'"),
    ],
    ids=["fused SGD", "fused Adagrad", "foreach Rprop", "rate", "closure", "plateau", "later step", "scheduler"],
)
def test_options_that_do_not_work_are_refused_by_key(
    mesh: DeviceMesh, optimizer: Any, scheduler: Any, message: str
) -> None:
    """It catches a trial on plain tensors, which take what the sharded parameters of a run refuse."""
    with pytest.raises(ConfigError, match=message):
        try_optimizer("model.", optimizer, scheduler, mesh, CPU)


@pytest.mark.parametrize("optimizer", [partial(optim.AdamW, fused=True), optim.SGD, Muon, optim.Adafactor])
def test_options_that_work_are_taken(mesh: DeviceMesh, optimizer: Any) -> None:
    made = []

    def make(parameters: Any) -> Any:
        made.append(optimizer(parameters, lr=0.1))
        return made[0]

    try_optimizer("model.", make, partial(optim.lr_scheduler.StepLR, step_size=1), mesh, CPU)
    assert len(made[0].state) == (0 if isinstance(made[0], optim.SGD) else 2)
