"""The algorithms of this repository whose mutants ``algorithm_kit_mutants`` makes, with their kits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rlplug_devkit import AlgorithmConformance

from benchmarks.task_kit_subjects import Subject

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "plugins" / "algos" / "tests"), str(ROOT / "tests")]
from worked_examples import settings_of  # noqa: E402 - a module of a plugin's tests


def algorithm(name: str, zero_advantages: str = "group", **options: Any) -> Callable[[Mapping[str, Any]], type]:
    """Return what makes the kit of an algorithm, as the plugin's own tests do."""

    def checks(made: Mapping[str, Any]) -> type:
        body = {"make_algorithm": lambda _: made[name](**options), "zero_advantages": zero_advantages}
        return type("Checks", (AlgorithmConformance,), body | settings_of(made[name]))

    return checks


def parts(own: str, *names: str, **others: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return names by module of the plugin: those that others use, then the algorithm's own."""
    return {f"rlplug_algos.{module}": found for module, found in {**others, own: names}.items()}


SHARED: Final = ("present", "mean_over_tokens", "PolicyGradient", "ClippedPolicyGradient")
ALGORITHMS: Final = [
    Subject(
        "GRPO",
        parts(
            "grpo",
            "GRPO",
            policy_losses=("_ratio", "token_ratio", "clipped_loss"),
            advantages=("_Groups", "group_relative", "degenerate_share"),
            aggregation=("aggregate",),
            corrections=("importance_weights", "limited_weights"),
            kl=("kl_estimate", "_k3_penalty", "kl_penalty"),
            policy_gradient=SHARED,
        ),
        algorithm("GRPO"),
    ),
    Subject(
        "RLOO",
        parts(
            "rloo",
            "RLOO",
            policy_losses=("_ratio", "sequence_ratio"),
            advantages=("_Groups", "leave_one_out"),
            policy_gradient=SHARED,
        ),
        algorithm("RLOO"),
    ),
    Subject(
        "PPO",
        parts(
            "ppo",
            "PPO",
            advantages=(
                "_last_tokens",
                "token_rewards",
                "_decayed_sums",
                "generalized_advantages",
                "normalise",
                "whiten",
                "explained_variance",
            ),
            value_losses=("clipped_value_loss",),
            kl=("AdaptiveKL",),
            policy_gradient=SHARED,
        ),
        algorithm("PPO", "never", kl_coefficient=0.1, kl_target=0.05),
    ),
    Subject(
        "VAPO",
        parts(
            "vapo",
            "VAPO",
            advantages=("length_adaptive_lambda", "_last_tokens", "_decayed_sums", "generalized_advantages"),
            ppo=("PPO",),
        ),
        algorithm("VAPO", "never"),
    ),
    Subject(
        "ReinforcePP",
        parts("reinforce_pp", "ReinforcePP", advantages=("discounted_returns",)),
        algorithm("ReinforcePP", "step"),
    ),
    Subject(
        "ReinforcePPBaseline", parts("reinforce_pp", "ReinforcePPBaseline"), algorithm("ReinforcePPBaseline", "step")
    ),
    Subject("DAPO", parts("dapo", "DAPO"), algorithm("DAPO", overlong_filter=True)),
    Subject("DrGRPO", parts("dr_grpo", "DrGRPO"), algorithm("DrGRPO")),
    Subject("CISPO", parts("cispo", "CISPO", policy_losses=("cispo_loss",)), algorithm("CISPO")),
    Subject("GSPO", parts("gspo", "GSPO"), algorithm("GSPO")),
    Subject("PFPPO", parts("pf_ppo", "PFPPO"), algorithm("PFPPO", "never", keep="best_random")),
    Subject(
        "Composed",
        parts(
            "composed",
            "Composed",
            functions=("bound", "group", "others", "returns", "clipped", "sequence_clipped", "bounded_weight"),
        ),
        algorithm("Composed"),
    ),
]
SUBJECTS: Final[dict[str, list[Subject]]] = {"algorithm": ALGORITHMS}
"""Subjects by kind."""
