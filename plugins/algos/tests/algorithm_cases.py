"""Every algorithm with several configurations, and what its paper's settings are in the oracle's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import oracle_algorithms
import torch
from random_batches import MAX_NEW_TOKENS, RUN, Draw
from rlplug_algos.cispo import CISPO
from rlplug_algos.corrections import Correction
from rlplug_algos.dapo import DAPO
from rlplug_algos.dr_grpo import DrGRPO
from rlplug_algos.grpo import GRPO
from rlplug_algos.gspo import GSPO
from rlplug_algos.pf_ppo import PFPPO
from rlplug_algos.ppo import PPO
from rlplug_algos.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rlplug_algos.rloo import RLOO
from rlplug_algos.vapo import VAPO
from rlplug_devkit.padded_rows import PaddedRows
from torch import Tensor

from rlplug.interfaces import Algorithm, Denominators, LossOutput


@dataclass(frozen=True)
class Case:
    """``options`` go to the class, ``settings`` to the oracle: the class's defaults as its paper has them, changed."""

    algorithm: type[Algorithm]
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.options.items() if key != "correction"]
        if "correction" in self.options:
            options.append("-".join(["correction", *map(str, self.settings["correction"].values())]))
        return ",".join([self.algorithm.__name__, *options])

    @property
    def oracle(self) -> dict[str, Any]:
        return PAPERS[self.algorithm.__name__] | self.settings

    def make(self) -> Any:
        algorithm = self.algorithm(**self.options)
        algorithm.setup(RUN)
        return algorithm


GROUP = {
    "advantages": "group",
    "ratio": "token",
    "clip": (0.2, 0.2),
    "aggregation": "token",
    "estimator": "k3_unweighted",
}
CRITIC = GROUP | {
    "advantages": "critic",
    "gamma": 1.0,
    "lam": 0.95,
    "whiten": True,
    "estimator": "k1",
    "value_clip": 0.2,
}
PAPERS: dict[str, dict[str, Any]] = {
    "GRPO": GROUP,
    "DrGRPO": GROUP | {"group": {"normalize_std": False}, "aggregation": "constant"},
    "DAPO": GROUP | {"clip": (0.2, 0.28)},
    "RLOO": GROUP | {"advantages": "leave_one_out", "ratio": "sum", "aggregation": "sequence"},
    "ReinforcePP": GROUP | {"advantages": "returns_whitened", "gamma": 1.0},
    "ReinforcePPBaseline": GROUP | {"advantages": "group_whitened", "estimator": "k2"},
    "GSPO": GROUP | {"ratio": "mean", "clip": (3e-4, 4e-4), "aggregation": "sequence"},
    "CISPO": GROUP | {"ratio_range": (0.0, 5.0)},
    "PPO": CRITIC,
    "VAPO": CRITIC | {"clip": (0.2, 0.28), "alpha": 0.05, "lam": 1.0, "nll": (0.1, 1.0)},
    "PFPPO": CRITIC,
}


def corrected(algorithm: type[Algorithm], **correction: Any) -> Case:
    return Case(algorithm, {"correction": Correction(**correction)}, {"correction": correction})


def kl_in_loss(algorithm: type[Algorithm], estimator: str, coefficient: float = 0.3, **options: Any) -> Case:
    options |= {"kl_coefficient": coefficient, "kl_estimator": estimator}
    return Case(algorithm, options, {"kl": coefficient, "estimator": estimator})


def limited(estimator: str) -> Case:
    case = kl_in_loss(GRPO, estimator, k3_max=0.1)
    return Case(GRPO, case.options, case.settings | {"k3_max": 0.1})


CASES = [
    Case(GRPO),
    Case(
        GRPO,
        {"clip_low": 0.1, "clip_high": 0.3, "aggregation": "sequence"},
        {"clip": (0.1, 0.3), "aggregation": "sequence"},
    ),
    Case(
        GRPO,
        {"normalize_std": False, "aggregation": "constant"},
        {"group": {"normalize_std": False}, "aggregation": "constant"},
    ),
    Case(GRPO, {"epsilon": 0.5, "entropy_coefficient": 0.01}, {"group": {"epsilon": 0.5}, "entropy": 0.01}),
    Case(GRPO, {"kl_coefficient": 0.05}, {"kl": 0.05}),
    *(kl_in_loss(GRPO, estimator) for estimator in ("k1", "k2", "k3", "k3_unweighted")),
    *(limited(estimator) for estimator in ("k3", "k3_unweighted")),
    Case(GRPO, {"clip_dual": 1.3}, {"clip": (0.2, 0.2, 1.3)}),
    *(corrected(GRPO, level=a, mode=b, cap=1.5) for a in ("token", "sequence") for b in ("truncate", "mask")),
    corrected(GRPO, level="token", mode="mask", cap=1.4, floor=0.7),
    Case(DrGRPO),
    Case(DrGRPO, {"kl_coefficient": 0.1, "entropy_coefficient": 0.02}, {"kl": 0.1, "entropy": 0.02}),
    Case(DAPO),
    Case(DAPO, {"overlong_buffer": 4}, {"overlong": (4, 1.0)}),
    Case(DAPO, {"epsilon": 0.2, "clip_dual": 1.4}, {"group": {"epsilon": 0.2}, "clip": (0.2, 0.28, 1.4)}),
    Case(
        DAPO, {"overlong_filter": True, "aggregation": "sequence"}, {"overlong_filter": True, "aggregation": "sequence"}
    ),
    Case(
        DAPO,
        {"overlong_filter": True, "overlong_buffer": 3, "overlong_penalty": 0.5},
        {"overlong_filter": True, "overlong": (3, 0.5)},
    ),
    Case(RLOO),
    Case(RLOO, {"kl_coefficient": 0.2, "clip_low": 0.3, "clip_high": 0.4}, {"sequence_kl": 0.2, "clip": (0.3, 0.4)}),
    Case(RLOO, {"clip_dual": 1.5}, {"clip": (0.2, 0.2, 1.5)}),
    corrected(RLOO, level="sequence", mode="truncate", cap=2.0, floor=0.5),
    Case(ReinforcePP),
    Case(ReinforcePP, {"kl_coefficient": 0.1, "clip_high": 0.3}, {"token_kl": 0.1, "clip": (0.2, 0.3)}),
    Case(ReinforcePP, {"kl_coefficient": 0.1, "gamma": 0.7}, {"token_kl": 0.1, "gamma": 0.7}),
    Case(ReinforcePPBaseline),
    Case(ReinforcePPBaseline, {"kl_coefficient": 0.1}, {"kl": 0.1}),
    Case(GSPO),
    Case(GSPO, {"clip_low": 0.1, "clip_high": 0.05, "kl_coefficient": 0.2}, {"clip": (0.1, 0.05), "kl": 0.2}),
    Case(GSPO, {"epsilon": 1e-6, "clip_dual": 1.01}, {"group": {"epsilon": 1e-6}, "clip": (3e-4, 4e-4, 1.01)}),
    corrected(GSPO, level="token", mode="truncate", cap=1.2),
    Case(CISPO),
    Case(CISPO, {"ratio_min": 0.9, "ratio_max": 1.1}, {"ratio_range": (0.9, 1.1)}),
    Case(CISPO, {"epsilon": 0.3}, {"group": {"epsilon": 0.3}}),
    corrected(CISPO, level="sequence", mode="mask", cap=3.0, floor=0.3),
    Case(PPO),
    Case(
        PPO,
        {"gamma": 0.9, "gae_lambda": 0.7, "clip_dual": 1.1, "whiten_advantages": False, "value_clip": None},
        {"gamma": 0.9, "lam": 0.7, "clip": (0.2, 0.2, 1.1), "whiten": False, "value_clip": None},
    ),
    Case(PPO, {"kl_coefficient": 0.1}, {"token_kl": 0.1}),
    Case(PPO, {"kl_coefficient": 0.1, "kl_estimator": "k3"}, {"token_kl": 0.1, "token_kl_estimator": "k3"}),
    Case(
        PPO,
        {"kl_coefficient": 0.1, "kl_estimator": "k3", "k3_max": 0.1},
        {"token_kl": 0.1, "token_kl_estimator": "k3", "k3_max": 0.1},
    ),
    Case(PPO, {"kl_coefficient": 0.1, "kl_in": "loss"}, {"kl": 0.1}),
    Case(PPO, {"entropy_coefficient": 0.05, "aggregation": "sequence"}, {"entropy": 0.05, "aggregation": "sequence"}),
    Case(VAPO),
    Case(
        VAPO, {"alpha": 0.6, "positive_nll_coefficient": 0.3, "positive_reward": 0.1}, {"alpha": 0.6, "nll": (0.3, 0.1)}
    ),
    Case(
        VAPO,
        {"critic_lambda": 0.8, "positive_nll_coefficient": 0.0, "value_clip": 0.1},
        {"lam": 0.8, "nll": (0.0, 1.0), "value_clip": 0.1},
    ),
    Case(PFPPO),
    Case(PFPPO, {"kl_coefficient": 0.05, "gae_lambda": 1.0}, {"token_kl": 0.05, "lam": 1.0}),
]
ONE_EACH = [next(case for case in CASES if case.algorithm.__name__ == name) for name in PAPERS]
WITH_CRITIC = [case for case in CASES if case.oracle["advantages"] == "critic"]


def sampled(case: Case, draw: Draw) -> tuple[Any, PaddedRows]:
    """The algorithm, and the batch as the loop has it before advantages: with what the algorithm asks for, no more."""
    algorithm, batch = case.make(), draw.batch
    needs = algorithm.needs
    return algorithm, batch.replace(
        old_logprobs=batch.old_logprobs if needs.old_logprobs else None,
        ref_logprobs=batch.ref_logprobs if needs.reference_policy else None,
        values=batch.values if needs.critic else None,
        rollout_logprobs=batch.rollout_logprobs if needs.rollout_logprobs else batch.rollout_logprobs * float("nan"),
    )


def ready(case: Case, draw: Draw) -> tuple[Any, PaddedRows]:
    """The same, as the loop has it for the losses, with the oracle's advantages and returns."""
    algorithm, batch = sampled(case, draw)
    target, dtype = oracle_advantages(case, draw), draw.logprobs.dtype
    return algorithm, batch.replace(
        old_logprobs=draw.batch.old_logprobs,
        advantages=torch.from_numpy(target.advantages).to(dtype),
        returns=None if target.returns is None else torch.from_numpy(target.returns).to(dtype),
        response_mask=torch.from_numpy(target.response_mask),
    )


def advantages_of(algorithm: Algorithm, rows: PaddedRows) -> SimpleNamespace:
    """The advantages of a step, each tensor [B, T]: advantages, returns or None, response_mask; and metrics."""
    step = rows.flat()
    result = algorithm.advantages(step)
    advantages = result.of_tokens if result.of_sequences is None else step.spread(result.of_sequences)
    mask = rows.response_mask if result.trains is None else rows.grid(result.trains)
    return SimpleNamespace(
        advantages=torch.where(mask, rows.grid(advantages), 0.0),
        returns=None if result.returns is None else rows.grid(result.returns),
        response_mask=mask,
        metrics=result.metrics,
    )


def loss_of(
    algorithm: Algorithm, rows: PaddedRows, logprobs: Tensor, entropy: Tensor, denominators: Denominators
) -> LossOutput:
    """The policy's loss of padded rows, whose logprobs and entropy are [B, T]."""
    return algorithm.loss(rows.tokens, rows.trained(logprobs), rows.trained(entropy), denominators)


def value_loss_of(algorithm: Algorithm, rows: PaddedRows, values: Tensor, denominators: Denominators) -> LossOutput:
    return algorithm.value_loss(rows.tokens, rows.trained(values), denominators)


def oracle_advantages(case: Case, draw: Draw) -> SimpleNamespace:
    return oracle_algorithms.advantages(oracle_algorithms.arrays(draw.batch), case.oracle, MAX_NEW_TOKENS)
