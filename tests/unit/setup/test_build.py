"""How a resumed run's optimizers take a changed configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlplug.recording.resumed_run import take_optimizer_options
from rlplug.setup.build import make_optimizers


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **({"lr": 0.1, "weight_decay": 0.0} | options))


SCHEDULES = {
    "none": None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.01),
    "longer": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=0.02),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
        ],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("new", SCHEDULES)
@pytest.mark.parametrize("old", ["none", "cosine", "warm-up"])
@pytest.mark.parametrize("critic", [False, True])
def test_a_resumed_optimizer_takes_new_options_as_if_it_had_always_had_them(old, new, critic):
    """It catches an option that the restored state overrides, such as the learning rate."""
    policy = torch.nn.Linear(2, 2)
    models = SimpleNamespace(policy=policy, critic=torch.nn.Linear(1, 1) if critic else None)

    def config(schedule, **options):
        of_critic = SimpleNamespace(make_optimizer=adamw, lr_scheduler=SCHEDULES["cosine"])
        return SimpleNamespace(
            optimizer=lambda parameters: adamw(parameters, **options),
            lr_scheduler=SCHEDULES[schedule],
            critic=of_critic if critic else None,
        )

    def take_step(optimizer, scheduler):
        policy(torch.ones(2)).sum().backward()
        used = {name: value for name, value in optimizer.param_groups[0].items() if not name.startswith("param")}
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return used

    optimizers, schedulers = make_optimizers(config(old), models)
    for _ in range(6):
        take_step(optimizers[0], schedulers[0])
    moments = {name: value.clone() for name, value in optimizers[0].state[policy.weight].items()}
    saved = optimizers[0].state_dict()
    changed = config(new, lr=0.02, betas=(0.5, 0.6), weight_decay=0.3)
    optimizers, schedulers = make_optimizers(changed, models)
    optimizers[0].load_state_dict(saved)

    take_optimizer_options(changed, models, optimizers, schedulers, [6, 8][: len(optimizers)])

    assert all(torch.equal(optimizers[0].state[policy.weight][name], moments[name]) for name in moments)
    always = make_optimizers(changed, models)
    expected = [take_step(always[0][0], always[1][0]) for _ in range(10)]
    assert [take_step(optimizers[0], schedulers[0]) for _ in range(4)] == expected[6:]
    if critic:
        assert schedulers[1].last_epoch == 8
