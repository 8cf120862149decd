"""The core's kit of algorithms, over all of this plugin's."""

from __future__ import annotations

from typing import Any

import pytest
from rlplug_algos.cispo import CISPO
from rlplug_algos.composed import Composed
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
from rlplug_devkit import AlgorithmConformance
from worked_examples import settings_of

from rlplug.interfaces import Algorithm

nightly = pytest.mark.nightly


def kit(make: type[Algorithm], zero_advantages: str = "group", **options: Any) -> type[AlgorithmConformance]:
    """Return the checks of an algorithm with these options."""
    body = {"make_algorithm": lambda _: make(**options), "zero_advantages": zero_advantages}
    return type(f"Test{make.__name__}", (AlgorithmConformance,), body | settings_of(make))


TestGRPO = kit(GRPO)
TestReinforcePPBaseline = kit(ReinforcePPBaseline, "step")
TestPPO = kit(PPO, "never", kl_coefficient=0.1, kl_target=0.05)

TestDrGRPO = nightly(kit(DrGRPO))
TestDAPO = nightly(kit(DAPO, overlong_filter=True))
TestRLOO = nightly(kit(RLOO))
TestGSPO = nightly(kit(GSPO))
TestComposed = nightly(kit(Composed))
TestCISPO = nightly(kit(CISPO))
TestReinforcePP = nightly(kit(ReinforcePP, "step"))
TestVAPO = nightly(kit(VAPO, "never"))
TestPFPPO = nightly(kit(PFPPO, "never", keep="best_random"))
# terms that the defaults leave out
PENALTIES = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "correction": Correction()}
TestPenalties = nightly(kit(GRPO, aggregation="sequence", **PENALTIES))
