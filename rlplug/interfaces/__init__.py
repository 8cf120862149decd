"""Interfaces that plugins implement, one small abstract base class per file; plugins import them from here."""

from rlplug.interfaces.algorithm import Advantages, Algorithm, Denominators, LossDivisor, LossOutput, Needs, RunInfo
from rlplug.interfaces.environment import Environment, Message, StepResult
from rlplug.interfaces.launcher import LOST, Launcher, Place, RunningTask, TaskNeeds
from rlplug.interfaces.memory import ActivationTraits, EngineMemory, EngineMemoryRequest
from rlplug.interfaces.memory_plan import GPU, MemoryDecisions
from rlplug.interfaces.observer import ObservedRun, ProfiledSteps, RunObserver, StepRecord, Validation
from rlplug.interfaces.optimization import Effect, Optimization
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
from rlplug.interfaces.router_replay import NOT_RECORDED, RouterReplay, RouterShape, replace_choice, replayed
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

__all__ = [
    "GPU",
    "LOST",
    "NOT_RECORDED",
    "ActivationTraits",
    "AdapterWeights",
    "Advantages",
    "Algorithm",
    "Bucket",
    "Denominators",
    "Effect",
    "EngineCapabilities",
    "EngineFault",
    "EngineMemory",
    "EngineMemoryRequest",
    "Environment",
    "FP8Weights",
    "HFWeight",
    "Launcher",
    "LossDivisor",
    "LossOutput",
    "MemoryDecisions",
    "Message",
    "ModelConfig",
    "ModelTrainer",
    "Needs",
    "ObservedRun",
    "Optimization",
    "Place",
    "Placement",
    "PolicySpec",
    "ProfiledSteps",
    "Reward",
    "RolloutEngine",
    "RouterReplay",
    "RouterShape",
    "RunInfo",
    "RunObserver",
    "RunningTask",
    "ScrapeTargets",
    "SleepingPart",
    "StepRecord",
    "StepResult",
    "SyncReport",
    "TaskNeeds",
    "TensorInfo",
    "TokenLog",
    "TokenLogOptions",
    "TrainerClaims",
    "Validation",
    "WeightsOfParameters",
    "replace_choice",
    "replayed",
]
