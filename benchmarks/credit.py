"""A task on which PPO needs its critic: a completion's first token decides the reward, and lambda is 0.

With ``gae_lambda: 0`` the advantage of a token is ``V(next state) - V(state)``, and only the last token sees the
reward. A critic that has learned which first tokens pay gives the first token its advantage. With a critic that stays
at its initial weights, whose values are noise near 0, PPO cannot learn what the first token earns.
"""

from __future__ import annotations

import json

NUM_STEPS = 40


def starts_with_seven(completion: str) -> float:
    """Return 1 for a completion whose first token is a 7, else 0: with random weights one in twelve."""
    return float(completion.startswith("7"))


def arguments(seed: int) -> dict[str, list[str]]:
    """Return what comes after the quickstart's configuration for PPO with its critic, and with one that never learns.

    Args:
        seed: Seed of the value head; the caller sets those of policy and run.
    """
    reward = {"class_path": "FunctionReward", "init_args": {"function": "benchmarks.credit.starts_with_seven"}}
    shared = [
        *("--model.rewards", json.dumps([reward])),
        *("--model.algorithm", json.dumps({"class_path": "PPO", "init_args": {"gae_lambda": 0.0}})),
        *("--model.batch.prompts_per_step", "32", "--model.batch.group_size", "4"),
        *("--model.optimizer.init_args.lr", "1e-3"),
    ]
    return {
        name: [*shared, "--model.critic", json.dumps({"num_epochs": 4, "seed": seed, "optimizer": _adamw(lr)})]
        for name, lr in (("PPO", 1e-3), ("PPO, broken critic", 1e-12))
    }


def _adamw(lr: float) -> dict[str, object]:
    return {"class_path": "torch.optim.AdamW", "init_args": {"lr": lr, "weight_decay": 0.0, "betas": [0.9, 0.95]}}
