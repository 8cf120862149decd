"""Entry point of rlplug-algos: registers its algorithms."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug_algos.cispo import CISPO
from rlplug_algos.dapo import DAPO
from rlplug_algos.dr_grpo import DrGRPO
from rlplug_algos.grpo import GRPO
from rlplug_algos.gspo import GSPO
from rlplug_algos.pf_ppo import PFPPO
from rlplug_algos.ppo import PPO
from rlplug_algos.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rlplug_algos.rloo import RLOO
from rlplug_algos.vapo import VAPO

RLPLUG_API_VERSION = ">=2,<3"

ALGORITHMS = (CISPO, DAPO, DrGRPO, GRPO, GSPO, PFPPO, PPO, ReinforcePP, ReinforcePPBaseline, RLOO, VAPO)


@hookimpl
def rlplug_register_algorithms(registry: Registry) -> None:
    for algorithm in ALGORITHMS:
        registry.add("algorithms", algorithm)
