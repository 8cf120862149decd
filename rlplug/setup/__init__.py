"""Setup of a run from its configuration: reads its files, plans it, builds its models, and starts its parts."""

from rlplug.setup.build import build_models, make_optimizers, make_update, take_optimizer_options
from rlplug.setup.checks.engine import check_context, check_machine, check_rollout
from rlplug.setup.inputs import RunInputs, read_inputs
from rlplug.setup.planning import RunPlan, plan_fit, plan_run
from rlplug.setup.start import Run, make_generator, make_mismatch_gate, make_rewards, start_run

__all__ = [
    "Run",
    "RunInputs",
    "RunPlan",
    "build_models",
    "check_context",
    "check_machine",
    "check_rollout",
    "make_generator",
    "make_mismatch_gate",
    "make_optimizers",
    "make_rewards",
    "make_update",
    "plan_fit",
    "plan_run",
    "read_inputs",
    "start_run",
    "take_optimizer_options",
]
