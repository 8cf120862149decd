"""Interfaces that plugins implement, one small abstract base class per file; plugins import them from here."""

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug.interfaces.algorithm import Advantages, Algorithm, Denominators, LossDivisor, LossOutput, Needs, RunInfo
    from rlplug.interfaces.environment import Environment, Message, StepResult
    from rlplug.interfaces.memory import ActivationTraits, EngineMemory, EngineMemoryRequest
    from rlplug.interfaces.memory_plan import GPU, MemoryDecisions
    from rlplug.interfaces.observer import (
        ExperimentLog,
        ObservedRun,
        ProfiledSteps,
        RunObserver,
        StepRecord,
        Validation,
    )
    from rlplug.interfaces.optimization import Effect, Network, Optimization
    from rlplug.interfaces.reward import Reward
    from rlplug.interfaces.rollout import (
        EngineCapabilities,
        EngineFault,
        Placement,
        PolicySpec,
        RolloutEngine,
        ScrapeTargets,
        SleepingPart,
    )
    from rlplug.interfaces.router_replay import RouterReplay, RouterShape, replace_choice, replayed
    from rlplug.interfaces.token_log import TokenLog, TokenLogOptions
    from rlplug.interfaces.trainer import ModelConfig, ModelTrainer, TrainerClaims
    from rlplug.interfaces.weight_sync import (
        AdapterWeights,
        Bucket,
        FP8Weights,
        HFWeight,
        SyncReport,
        TensorInfo,
        WeightsOfParameters,
    )
    from rlplug.types import NOT_RECORDED

__all__ = ["GPU", "NOT_RECORDED", "ActivationTraits", "AdapterWeights", "Advantages", "Algorithm", "Bucket"]
__all__ += ["Denominators", "Effect", "EngineCapabilities", "EngineFault", "EngineMemory", "EngineMemoryRequest"]
__all__ += ["Environment", "ExperimentLog", "FP8Weights", "HFWeight", "LossDivisor", "LossOutput"]
__all__ += [
    "MemoryDecisions",
    "Message",
    "ModelConfig",
    "ModelTrainer",
    "Needs",
    "Network",
    "ObservedRun",
    "Optimization",
]
__all__ += ["Placement", "PolicySpec", "ProfiledSteps", "Reward", "RolloutEngine", "RouterReplay", "RouterShape"]
__all__ += ["RunInfo", "RunObserver", "ScrapeTargets", "SleepingPart", "StepRecord", "StepResult", "SyncReport"]
__all__ += ["TensorInfo", "TokenLog", "TokenLogOptions", "TrainerClaims", "Validation", "WeightsOfParameters"]
__all__ += ["replace_choice", "replayed"]
_MODULES = {
    "algorithm": "Advantages Algorithm Denominators LossDivisor LossOutput Needs RunInfo",
    "environment": "Environment Message StepResult",
    "memory": "ActivationTraits EngineMemory EngineMemoryRequest",
    "memory_plan": "GPU MemoryDecisions",
    "observer": "ExperimentLog ObservedRun ProfiledSteps RunObserver StepRecord Validation",
    "optimization": "Effect Network Optimization",
    "reward": "Reward",
    "rollout": "EngineCapabilities EngineFault Placement PolicySpec RolloutEngine ScrapeTargets SleepingPart",
    "router_replay": "NOT_RECORDED RouterReplay RouterShape replace_choice replayed",
    "token_log": "TokenLog TokenLogOptions",
    "trainer": "ModelConfig ModelTrainer TrainerClaims",
    "weight_sync": "AdapterWeights Bucket FP8Weights HFWeight SyncReport TensorInfo WeightsOfParameters",
}
__getattr__ = late_names(__name__, {name: module for module, names in _MODULES.items() for name in names.split()})
