"""Algorithms for rlplug: one file each, on ``policy_gradient.PolicyGradient`` and the pure functions beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_algos.cispo import CISPO
    from rlplug_algos.composed import Composed
    from rlplug_algos.corrections import Correction
    from rlplug_algos.dapo import DAPO
    from rlplug_algos.dr_grpo import DrGRPO
    from rlplug_algos.functions import advantage, policy_loss
    from rlplug_algos.grpo import GRPO
    from rlplug_algos.gspo import GSPO
    from rlplug_algos.pf_ppo import PFPPO
    from rlplug_algos.policy_gradient import ClippedPolicyGradient, PolicyGradient
    from rlplug_algos.ppo import PPO
    from rlplug_algos.reinforce_pp import ReinforcePP, ReinforcePPBaseline
    from rlplug_algos.rloo import RLOO
    from rlplug_algos.vapo import VAPO

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "PFPPO",
    "PPO",
    "RLOO",
    "VAPO",
    "ClippedPolicyGradient",
    "Composed",
    "Correction",
    "DrGRPO",
    "PolicyGradient",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "advantage",
    "policy_loss",
]

__getattr__ = late_names(
    __name__,
    {
        "CISPO": "cispo",
        "ClippedPolicyGradient": "policy_gradient",
        "Composed": "composed",
        "Correction": "corrections",
        "DAPO": "dapo",
        "DrGRPO": "dr_grpo",
        "GRPO": "grpo",
        "GSPO": "gspo",
        "PFPPO": "pf_ppo",
        "PPO": "ppo",
        "PolicyGradient": "policy_gradient",
        "RLOO": "rloo",
        "ReinforcePP": "reinforce_pp",
        "ReinforcePPBaseline": "reinforce_pp",
        "VAPO": "vapo",
        "advantage": "functions",
        "policy_loss": "functions",
    },
)
