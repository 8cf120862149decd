"""Parts that rollout engines share. Authors of engine plugins import them from here."""

from rlplug.rollout.engines.answer_checks import check_tokens
from rlplug.rollout.engines.colocated import ColocatedEngine, FirstRankEngine, StartedEngine, TrackedEngine
from rlplug.rollout.engines.context_limit import max_completion_tokens
from rlplug.rollout.engines.environment import environment_variables, is_trainer_variable, process_kept
from rlplug.rollout.engines.finish_reasons import as_finish_reason
from rlplug.rollout.engines.loop import EngineLoop
from rlplug.rollout.engines.loop_requests import LoopRequests
from rlplug.rollout.engines.memory import EngineSizes, MemoryAdvice, MemoryBefore
from rlplug.rollout.engines.options import EngineOptions, PassThrough
from rlplug.rollout.engines.process import EngineProcess
from rlplug.rollout.engines.ranks import EngineRanks
from rlplug.rollout.engines.requests import EngineRequests, RunningRequest, arrivals
from rlplug.rollout.engines.stats import EngineStats
from rlplug.rollout.engines.versions import SupportedVersions, declared_fields, package_folder
from rlplug.rollout.routed_experts import experts_of_request
from rlplug.rollout.seeded_sampler import SeededSampler

__all__ = [
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
    "declared_fields",
    "environment_variables",
    "experts_of_request",
    "is_trainer_variable",
    "max_completion_tokens",
    "package_folder",
    "process_kept",
]
