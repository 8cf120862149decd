"""Parts that rollout engines share. Authors of engine plugins import them from here."""

from rlplug.rollout.answer_checks import check_tokens
from rlplug.rollout.context_limit import max_completion_tokens
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.seeded_sampler import SeededSampler
from rlplug_engines.colocated.colocated import ColocatedEngine, FirstRankEngine, StartedEngine, TrackedEngine
from rlplug_engines.colocated.environment import (
    environment_variables,
    is_trainer_variable,
    process_kept,
    recursion_limit_kept,
)
from rlplug_engines.colocated.finish_reasons import as_finish_reason
from rlplug_engines.colocated.loop import EngineLoop
from rlplug_engines.colocated.loop_requests import LoopRequests
from rlplug_engines.colocated.memory import EngineSizes, MemoryAdvice, MemoryBefore
from rlplug_engines.colocated.options import SHARED_NAMES, EngineOptions, PassThrough, deciding
from rlplug_engines.colocated.process import EngineProcess
from rlplug_engines.colocated.random_state import preserved_rng
from rlplug_engines.colocated.requests import EngineRequests, RunningRequest, arrivals
from rlplug_engines.colocated.routed_experts import experts_of_request
from rlplug_engines.colocated.scheduler_advice import AdviceKeys
from rlplug_engines.colocated.stats import EngineStats
from rlplug_engines.colocated.versions import SupportedVersions, declared_fields, package_folder

__all__ = [
    "SHARED_NAMES",
    "AdviceKeys",
    "ColocatedEngine",
    "EngineLoop",
    "EngineOptions",
    "EngineProcess",
    "EngineRanks",
    "EngineRequests",
    "EngineSizes",
    "EngineStats",
    "FirstRankEngine",
    "LoopRequests",
    "MemoryAdvice",
    "MemoryBefore",
    "PassThrough",
    "RunningRequest",
    "SeededSampler",
    "StartedEngine",
    "SupportedVersions",
    "TrackedEngine",
    "arrivals",
    "as_finish_reason",
    "check_tokens",
    "deciding",
    "declared_fields",
    "environment_variables",
    "experts_of_request",
    "is_trainer_variable",
    "max_completion_tokens",
    "package_folder",
    "preserved_rng",
    "process_kept",
    "recursion_limit_kept",
]
