"""The entry point: what this distribution registers. The classes are imported when a run names them."""

from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry

RLPLUG_API_VERSION = ">=3,<4"


@hookimpl
def rlplug_register_algorithms(registry: Registry) -> None:
    for place in (
        "rlplug_algos.cispo:CISPO",
        "rlplug_algos.composed:Composed",
        "rlplug_algos.dapo:DAPO",
        "rlplug_algos.dr_grpo:DrGRPO",
        "rlplug_algos.grpo:GRPO",
        "rlplug_algos.gspo:GSPO",
        "rlplug_algos.pf_ppo:PFPPO",
        "rlplug_algos.ppo:PPO",
        "rlplug_algos.reinforce_pp:ReinforcePP",
        "rlplug_algos.reinforce_pp:ReinforcePPBaseline",
        "rlplug_algos.rloo:RLOO",
        "rlplug_algos.vapo:VAPO",
    ):
        registry.add("algorithms", place)
