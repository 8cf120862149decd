"""Worked examples of every algorithm for its kit: random small steps by the oracle, and some by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy
import oracle_algorithms
import torch
from algorithm_cases import CASES, GROUP, Case, oracle_advantages
from oracles import log_ratios, tokens_of
from random_batches import MAX_NEW_TOKENS, RUN, Draw, denominators_of, random_batch
from rlplug_algos.composed import Composed
from rlplug_devkit import Completion, WorkedExample
from torch import Tensor

from rlplug.interfaces import Advantages, Algorithm, RunInfo
from rlplug.types import Batch, StepBatch

SEEDS = (4, 17, 29, 41)
"""Random steps, of which one has a group with a failed reward and one a completion without tokens."""


def examples_of(algorithm: type[Algorithm]) -> list[WorkedExample]:
    """Return the examples of a class, with all options that its cases have."""
    cases = [case for case in [*CASES, *COMPOSED] if case.algorithm.__name__ == algorithm.__name__]
    drawn = [by_oracle(case, random_batch(seed)) for case in cases for seed in SEEDS]
    return [*drawn, *BY_HAND.get(algorithm.__name__, [])]


def by_oracle(case: Case, draw: Draw) -> WorkedExample:
    """Return what the papers' equations make of a random step, in float64 and without the package's code."""
    data, target = oracle_algorithms.arrays(draw.batch), oracle_advantages(case, draw)
    mask = data.response_mask
    now, entropy, values = (leaf.detach().numpy() for leaf in (draw.logprobs, draw.entropy, draw.values))

    def listed(array: Any) -> list[list[float]]:
        return [[float(array[i, t]) for t in tokens_of(mask, i)] for i in range(len(mask))]

    trained = copy.copy(data)
    trained.response_mask, trained.advantages, trained.returns = target.response_mask, target.advantages, target.returns
    counts = denominators_of(draw.batch.replace(response_mask=torch.from_numpy(target.response_mask)))
    policy = oracle_algorithms.loss(trained, now, entropy, case.oracle, counts, MAX_NEW_TOKENS)
    ratios = numpy.exp(log_ratios(now, data.old_logprobs, target.response_mask, case.oracle["ratio"]))
    metrics = {**target.metrics, **policy.metrics}
    critic: dict[str, Any] = {}
    if target.returns is not None:
        loss, gradient, clipped = oracle_algorithms.value_loss(trained, values, case.oracle["value_clip"], counts)
        critic = {"returns": listed(target.returns), "value_loss": loss, "value_gradient": listed(gradient)}
        metrics["critic/clip_fraction"] = clipped
    if target.response_mask.any():
        metrics["policy/ratio_min"], metrics["policy/ratio_max"] = policy.extremes
    numbers = zip(
        *map(listed, (now, data.old_logprobs, data.ref_logprobs, data.rollout_logprobs)),
        *map(listed, (data.values, values, entropy)),
        strict=True,
    )
    return WorkedExample(
        completions=[
            Completion(
                float(data.rewards[i]) if data.reward_valid[i] else None,
                *each,
                group=int(data.group_index[i]),
                truncated=bool(data.truncated[i]),
            )
            for i, each in enumerate(numbers)
        ],
        advantages=listed(target.advantages),
        trains=[float(target.response_mask[i].any() or not mask[i].any()) for i in range(len(mask))],
        loss=policy.loss,
        gradient=listed(policy.gradient),
        entropy_gradient=listed(policy.entropy_gradient),
        metrics=metrics,
        per_token={"ratio": listed(ratios)} if (target.response_mask == mask).all() else {},
        options=case.options,
        run=RUN,
        **critic,
    )


class ComposedCase(Case):
    """Functions by name; ``settings`` are all of the oracle's."""

    @property
    def oracle(self) -> dict[str, Any]:
        return GROUP | self.settings


COMPOSED = [
    ComposedCase(Composed),
    ComposedCase(
        Composed,
        {"advantage": "others", "policy_loss": "sequence_clipped"},
        {"advantages": "leave_one_out", "ratio": "mean", "clip": (3e-4, 4e-4)},
    ),
    ComposedCase(
        Composed,
        {"advantage": "returns", "policy_loss": "bounded_weight"},
        {"advantages": "returns_whitened", "gamma": 1.0, "ratio_range": (0.0, 5.0)},
    ),
    ComposedCase(
        Composed,
        {
            "advantage_options": {"epsilon": 0.5},
            "policy_loss_options": {"clip_low": 0.1, "clip_high": 0.3, "clip_dual": 1.3},
        },
        {"group": {"epsilon": 0.5}, "clip": (0.1, 0.3, 1.3)},
    ),
    ComposedCase(
        Composed,
        {"advantage_options": {"normalize_std": False}, "policy_loss": "bounded_weight"}
        | {"policy_loss_options": {"ratio_min": 0.9, "ratio_max": 1.1}},
        {"group": {"normalize_std": False}, "ratio_range": (0.9, 1.1)},
    ),
]


def of_rewards(*rewards: float | None, group: int = 0, lengths: tuple[int, ...] = ()) -> list[Completion]:
    """Return completions of a group with these rewards, of two tokens where no lengths are given."""
    sizes = lengths or (2,) * len(rewards)
    return [Completion(reward, [-1.0] * size, group=group) for reward, size in zip(rewards, sizes, strict=True)]


def one_token(reward: float, old: float, **numbers: float) -> Completion:
    return Completion(reward, [old], **{name: [number] for name, number in numbers.items()})


def unclipped(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return a loss that says nothing of clipping, for ``Composed``."""
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    return -(logprobs - batch.old_logprobs).exp() * batch.advantages


def first_only(batch: StepBatch) -> Advantages:
    """Return advantages as a whole result, with a metric."""
    return Advantages(batch.rewards.clone(), metrics={"made/count": float(batch.num_sequences)})


def adapted(coefficient: float, **metrics: float) -> WorkedExample:
    """A penalty of one nat, after a step of 16 completions with these metrics (arXiv:1909.08593, section 2.2)."""
    return WorkedExample(
        [one_token(1.0, -1.0, ref_logprobs=-2.0)],
        advantages=[1 - coefficient],
        returns=[[1 - coefficient]],
        metrics={"policy/kl_coefficient": coefficient, "policy/kl": 1.0},
        observed=[{name.replace("_", "/"): number for name, number in metrics.items()}],
        options={"kl_coefficient": 0.1, "kl_target": 0.05, "kl_horizon": 16, "whiten_advantages": False},
        run=RUN,
    )


# two completions with advantages of 0.5 and -0.5, whose engine's logprobs are 1 nat lower and equal: e is cut at 2
FP8 = WorkedExample(
    [one_token(1.0, -1.0, rollout_logprobs=-2.0), one_token(0.0, -1.0)],
    advantages=[0.5, -0.5],
    loss=(-2 * 0.5 + 0.5) / 2,
    gradient=[[-2 * 0.5 / 2], [0.5 / 2]],
    metrics={"correction/weight_mean": 1.5, "correction/limited_share": 0.5},
    options={"normalize_std": False},
    run=RunInfo(num_completions=16, group_size=4, max_new_tokens=MAX_NEW_TOKENS, fp8_rollout=True),
)
SAMPLED = [*of_rewards(1.0, 0.0), *of_rewards(1.0, 1.0, group=1), *of_rewards(None, 1.0, group=2)]
# equation 13 of arXiv:2503.14476: the longest of 8 tokens loses all, one of 6 the half, and one of 4 nothing
LONG = [*of_rewards(1.0, 0.0, lengths=(8, 4)), *of_rewards(1.0, 1.0, group=1, lengths=(8, 2))]
LONG += of_rewards(1.0, 0.0, None, group=2, lengths=(6, 4, 2))
NOISY = [*of_rewards(0.5, 1.0, 0.0, None), *of_rewards(1.0, 1.0, 0.0, 0.0, group=1), *of_rewards(2.0, group=2)]
BY_HAND: dict[str, list[WorkedExample]] = {
    "Composed": [
        WorkedExample(
            [Completion(2.0, [-1.0], old_logprobs=[-1.0 - math.log(2)])],
            advantages=[2.0],
            loss=-4.0,
            gradient=[[-4.0]],
            metrics={"made/count": 1.0, "policy/ratio_max": 2.0, "advantages/degenerate_groups": 1.0}
            | {"policy/clip_fraction_low": 0.0, "policy/clip_fraction_high": 0.0},
            per_token={"ratio": [[2.0]], "clipped_low": [[0.0]], "clipped_high": [[0.0]]},
            options={"advantage": "worked_examples.first_only", "policy_loss": "worked_examples.unclipped"},
        ),
    ],
    "GRPO": [FP8],
    "DAPO": [
        WorkedExample(SAMPLED, selected=[0, 1]),
        WorkedExample(SAMPLED, selected=[0, 1, 2, 3, 4, 5], options={"dynamic_sampling": False}),
        WorkedExample(LONG, selected=[4, 5, 6], options={"overlong_buffer": 4}, run=RUN),
    ],
    "PPO": [
        WorkedExample(
            of_rewards(1.0, 1.0),
            returns=[[1.0, 1.0]] * 2,
            metrics={"critic/explained_variance": 0.0},
            options={"gae_lambda": 1.0},
        ),
        WorkedExample(of_rewards(0.0, 0.0), metrics={"critic/explained_variance": 0.0}),
        adapted(0.12, loss=0.1, policy_kl=0.2),
        adapted(0.09, loss=0.1, policy_kl=0.045),
        adapted(0.1, lr=0.1),
    ],
    "PFPPO": [
        WorkedExample(NOISY, selected=[1, 2, 4, 7, 8]),
        WorkedExample(NOISY, selected=[1, 4, 8], options={"keep": "best"}),
        WorkedExample(NOISY[:1] + NOISY[2:4], selected=[0, 1], options={"keep": "best_random"}),
    ],
}

# ---- options ------------------------------------------------------------------------------------------------------

INFINITY = float("inf")
ANY_REFUSED: list[dict[str, Any]] = [
    {"aggregation": "mean"},
    {"kl_estimator": "k4"},
    {"kl_coefficient": -0.1},
    {"kl_coefficient": INFINITY},
    {"k3_max": 10.0},
    {"kl_coefficient": 0.1, "kl_estimator": "k3", "k3_max": 0.0},
    {"kl_coefficient": 0.1, "kl_estimator": "k3", "k3_max": INFINITY},
    {"kl_coefficient": 0.1, "kl_estimator": "k2", "k3_max": 10.0},
    {"entropy_coefficient": INFINITY},
]
ANY_ACCEPTED: list[dict[str, Any]] = [
    {},
    {"kl_coefficient": 0.1, "kl_estimator": "k3", "k3_max": 10.0},
    {"kl_coefficient": 0.1, "kl_estimator": "k3_unweighted", "k3_max": 0.5},
    {"entropy_coefficient": -0.01, "correction": None},
]
CLIPS_REFUSED: list[dict[str, Any]] = [
    *({"clip_low": number} for number in (0.0, 1.0)),
    {"clip_high": 0.0},
    *({"clip_dual": number} for number in (1.0, INFINITY)),
]
CLIPS_ACCEPTED: list[dict[str, Any]] = [{"clip_low": 0.999, "clip_high": 0.001}, {"clip_high": 2.0, "clip_dual": 1.01}]
EPSILONS: list[dict[str, Any]] = [{"epsilon": -0.1}, {"epsilon": INFINITY}]
GROUPS = [*EPSILONS, {"normalize_std": False, "epsilon": 0.5}]
GAMMAS: list[dict[str, Any]] = [{"gamma": -0.1}, {"gamma": 1.1}]
ADAPTIVE = {"kl_coefficient": 0.1, "kl_target": 0.05}
CRITICS: list[dict[str, Any]] = [
    *GAMMAS,
    {"value_clip": 0.0},
    {"kl_in": "loss and reward"},
    {"kl_coefficient": 0.1, "kl_target": 0.0},
    {"kl_target": 0.05},
    {"kl_horizon": 5000},
    {**ADAPTIVE, "kl_horizon": 0},
    {**ADAPTIVE, "kl_horizon": 23},
]
CRITICS_ACCEPTED: list[dict[str, Any]] = [
    *({"gamma": number} for number in (0.0, 1.0)),
    {"value_clip": 1.5},
    {**ADAPTIVE, "kl_horizon": 24},
]
LAMBDAS: list[dict[str, Any]] = [{"gae_lambda": -0.1}, {"gae_lambda": 1.1}]
REFUSED: dict[str, list[dict[str, Any]]] = {
    "GRPO": [*CLIPS_REFUSED, *GROUPS],
    "GSPO": [*CLIPS_REFUSED, *GROUPS],
    "DrGRPO": CLIPS_REFUSED,
    "RLOO": CLIPS_REFUSED,
    "CISPO": [*EPSILONS, {"ratio_min": -0.1}, {"ratio_min": 1.1}, {"ratio_max": 0.9}],
    "ReinforcePP": [*CLIPS_REFUSED, *GAMMAS],
    "ReinforcePPBaseline": CLIPS_REFUSED,
    "PPO": [*CLIPS_REFUSED, *CRITICS, *LAMBDAS],
    "PFPPO": [*CLIPS_REFUSED, *CRITICS, *LAMBDAS, {"keep": "worst"}],
    "VAPO": [
        *(*CLIPS_REFUSED, *CRITICS),
        *({"alpha": 0.0}, {"critic_lambda": -0.1}, {"critic_lambda": 1.1}, {"positive_nll_coefficient": -0.1}),
    ],
    "DAPO": [
        *(*CLIPS_REFUSED, *GROUPS, {"max_refills": -1}, {"over_sampling": 0.9}, {"over_sampling": 100.0}),
        *({"dynamic_sampling": False, "max_refills": 3}, {"dynamic_sampling": False, "over_sampling": 2.0}),
        *({"overlong_buffer": 0}, {"overlong_buffer": 12}, {"overlong_penalty": 0.5}),
        {"overlong_buffer": 4, "overlong_penalty": -0.1},
    ],
    "Composed": [
        *({"advantage": "nobody"}, {"policy_loss": "nothing"}, {"policy_loss": "no_module.function"}),
        *({"advantage_options": {"gamma": 1.0}}, {"policy_loss_options": {"clip": 0.2}}, {"advantage": "math.pi"}),
    ],
}
"""Options that a class must refuse in a run of 24 completions, four of each prompt, of at most 12 tokens."""
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "GRPO": [*CLIPS_ACCEPTED, {"epsilon": 0.0}],
    "GSPO": [*CLIPS_ACCEPTED, {"epsilon": 0.0}],
    "DrGRPO": CLIPS_ACCEPTED,
    "RLOO": CLIPS_ACCEPTED,
    "CISPO": [{"epsilon": 0.0}, {"ratio_min": 0.0, "ratio_max": 1.0}, {"ratio_min": 1.0}],
    "ReinforcePP": [*CLIPS_ACCEPTED, {"gamma": 0.0}],
    "ReinforcePPBaseline": CLIPS_ACCEPTED,
    "PPO": [*CLIPS_ACCEPTED, *CRITICS_ACCEPTED, {"gae_lambda": 0.0}],
    "PFPPO": [*CLIPS_ACCEPTED, *CRITICS_ACCEPTED, {"keep": "best"}],
    "VAPO": [*CLIPS_ACCEPTED, *CRITICS_ACCEPTED, {"critic_lambda": 0.0}, {"positive_nll_coefficient": 0.0}],
    "DAPO": [
        *(*CLIPS_ACCEPTED, {"epsilon": 0.0}, {"max_refills": 0, "over_sampling": 1.0}, {"over_sampling": 99.0}),
        *({"dynamic_sampling": False}, {"overlong_buffer": 11}, {"overlong_buffer": 1, "overlong_penalty": 0.0}),
    ],
    "Composed": [{"advantage": "rlplug_algos.functions.others"}],
}


def settings_of(algorithm: type[Algorithm]) -> dict[str, Any]:
    """Return what a kit's class has besides ``make_algorithm``."""
    name = algorithm.__name__
    return {
        "examples": lambda _: examples_of(algorithm),
        "accepted_options": [*ANY_ACCEPTED, *ACCEPTED[name]],
        "refused_options": [*ANY_REFUSED, *REFUSED[name]],
    }
