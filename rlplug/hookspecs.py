"""Specifications of all hooks that a plugin can implement.

A plugin is a module behind an entry point in the group ``rlplug.plugins``. It declares the hook API that it was
written for, ``RLPLUG_API_VERSION = ">=3,<4"``, and implements any of the functions below, marked with
``rlplug.plugin_manager.hookimpl``. Arguments are passed by keyword: take only those that you use.

Four forms:
    registration   called once at start; add classes to the registry
    observation    called on every rank at the end of a phase; a returned mapping is added to the step's metrics
    wrapper        must be ``@hookimpl(wrapper=True)``: runs around what the core does
    resolver       the first plugin that returns something other than None decides
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import Callback, Trainer
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlplug.config import RunConfig
    from rlplug.distributed.strategy import RLFSDP2Strategy
    from rlplug.interfaces import Algorithm, Bucket, Denominators, LossOutput, PolicySpec, RolloutEngine, SyncReport
    from rlplug.interfaces.memory_plan import GPU, MemoryDecisions
    from rlplug.interfaces.observer import ExperimentLog, RunObserver
    from rlplug.interfaces.token_log import TokenLog, TokenLogOptions
    from rlplug.registry import Registry
    from rlplug.rollout.source import RolloutSource
    from rlplug.training.batch_plan import BatchPlan
    from rlplug.training.row_layout import RowLayout
    from rlplug.types import Batch, MeshSizes, Rollout, StepBatch

API_VERSION: Final = "3.3"
"""Version of the hook API. A new hook or argument raises its second number, a changed meaning its first."""

SINCE: Final = MappingProxyType(
    {
        f"rlplug_{name}": version
        for version, names in {
            "1.0": "register_rollouts register_algorithms register_rewards register_optimizations after_rollout "
            "after_update sync_weights prepare_batch compute_loss make_tokenizer",
            "1.1": "register_environments",
            "1.2": "register_trainers",
            "2.0": "register_launchers",
            "2.2": "register_classes make_observer",
            "3.1": "make_source plan_memory make_token_log make_experiment_log make_profiler",
            "3.2": "make_row_layout",
            "3.3": "explain_key",
        }.items()
        for name in names.split()
    }
)
"""Version of the hook API that added each hook."""

DEPRECATED: Final[Mapping[str, str]] = MappingProxyType({})
"""Hooks that will go with 4.0, each with what to use instead: "since 3.4; use rlplug_prepare_batch_v2"."""

ENTRY_POINT_GROUP: Final = "rlplug.plugins"

WRAPPER_ONLY: Final = frozenset({"rlplug_sync_weights", "rlplug_prepare_batch", "rlplug_compute_loss"})
"""Hooks that the core implements; a plugin may only wrap them."""

hookspec = pluggy.HookspecMarker("rlplug")


# ---- registration -------------------------------------------------------------------------------------------------


@hookspec
def rlplug_register_rollouts(registry: Registry) -> None:
    """Add rollout engines: ``registry.add("rollouts", MyEngine)``. Do not import the engine's library here."""


@hookspec
def rlplug_register_trainers(registry: Registry) -> None:
    """Add trainers: ``registry.add("trainers", MyTrainer)``. Do not import the trainer's library here."""


@hookspec
def rlplug_register_algorithms(registry: Registry) -> None:
    """Add algorithms: ``registry.add("algorithms", MyAlgorithm)``."""


@hookspec
def rlplug_register_rewards(registry: Registry) -> None:
    """Add rewards: ``registry.add("rewards", MyReward)``."""


@hookspec
def rlplug_register_environments(registry: Registry) -> None:
    """Add environments: ``registry.add("environments", MyEnvironment)``."""


@hookspec
def rlplug_register_launchers(registry: Registry) -> None:
    """Add launchers: ``registry.add("launchers", MyLauncher)``. Do not import the scheduler's library here."""


@hookspec
def rlplug_register_optimizations(registry: Registry) -> None:
    """Add optimisations: ``registry.add("optimizations", MyOptimization)``."""


@hookspec
def rlplug_register_classes(registry: Registry) -> None:
    """Add other classes that YAML names without their module: ``registry.add("classes", "my_plugin.logger:MyLogger")``.

    They are prompt sources, Lightning's loggers and callbacks, optimizers and schedulers.
    """


# ---- observation --------------------------------------------------------------------------------------------------


@hookspec
def rlplug_after_rollout(rollout: Rollout, step: int) -> Mapping[str, float] | None:
    """Observe the scored samples of ``step`` that this rank has; return metrics or None.

    A rank without samples that train does not call it. A metric is the mean of what ranks return, weighted by their
    numbers of samples that train: return means over samples.
    """


@hookspec
def rlplug_after_update(metrics: Mapping[str, float], step: int) -> Mapping[str, float] | None:
    """Observe the metrics of ``step``; return more metrics or None."""


@hookspec
def rlplug_make_observer() -> RunObserver | None:
    """Return an observer of the run that starts, or None; each rank calls this once, before models are loaded.

    The observer gets one :class:`~rlplug.interfaces.observer.StepRecord` a step, with metrics, samples and batch.
    """


# ---- wrapper ------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def rlplug_sync_weights(
    engine: RolloutEngine, buckets: Iterable[Bucket], version: int
) -> SyncReport | Generator[None, SyncReport, SyncReport]:
    """Wrap the weight sync; the core's implementation is ``engine.update_weights(buckets, version)``.

    ``buckets`` can be iterated once, and only by the engine.
    """


@hookspec(firstresult=True)
def rlplug_prepare_batch(batch: StepBatch, step: int) -> StepBatch | Generator[None, StepBatch, StepBatch]:
    """Edit a rank's completions, advantages included, before the update: ``edited = (yield).replace(...)``.

    Every rank calls this with its own, whole groups, possibly none, and must replace the same tensors. Numbers
    over the whole step come from ``batch.step``. Edits nest in plugin order.
    """


@hookspec(firstresult=True)
def rlplug_compute_loss(
    algorithm: Algorithm, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators
) -> LossOutput | Generator[None, LossOutput, LossOutput]:
    """Wrap the policy's loss of one micro-batch; the core's implementation calls ``algorithm.loss``."""


# ---- resolver -----------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def rlplug_make_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a policy that ``AutoTokenizer`` cannot load; the core's implementation is called last."""


@hookspec(firstresult=True)
def rlplug_explain_key(name: str) -> str | None:
    """Return what to write for a key that does not exist, as a sentence, or None; ``name`` has its dots."""


@hookspec(firstresult=True)
def rlplug_make_source(config: RunConfig) -> RolloutSource | None:
    """Return the source of the groups that train, or None; the core's generates those of a step's own prompts.

    It is called before anything is loaded, and looks at the options to tell whether the run wants its source.
    """


@hookspec(firstresult=True)
def rlplug_make_row_layout(config: RunConfig, mesh: MeshSizes, on_gpu: bool) -> RowLayout | None:
    """Return what computes tokens that completions share once in a training, or None; the core computes each copy.

    It is called before anything is loaded, where ``model.batch.share_prefixes`` is set, and looks at the options.
    """


@hookspec(firstresult=True)
def rlplug_plan_memory(
    config: RunConfig,
    spec: PolicySpec,
    batch: BatchPlan,
    strategy: RLFSDP2Strategy,
    mesh: MeshSizes,
    longest: int,
    gpu: GPU,
) -> MemoryDecisions | None:
    """Plan the memory of a run on GPUs before a weight is loaded: whether the engine sleeps, and what the run needs.

    Only the strategy's options may be read. ``longest`` is the tokens of the longest possible prompt and completion,
    and ``gpu`` the fullest of the run's. All ranks call this with the same arguments.
    """


@hookspec(firstresult=True)
def rlplug_make_token_log(
    folder: Path,
    options: TokenLogOptions,
    config: RunConfig,
    strategy: RLFSDP2Strategy,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenLog | None:
    """Return what logs single tokens of a training into its ``folder``, or None; the core logs none.

    Nothing may be written before the first step: a run that is resumed may still be refused.
    """


@hookspec(firstresult=True)
def rlplug_make_experiment_log(folder: Path, trainer: Trainer) -> ExperimentLog | None:
    """Return what gives the trainer's loggers more than metrics, or brings more of them, or None.

    Nothing may be written to ``folder`` before the configuration is logged: a run that is resumed may still be refused.
    """


@hookspec(firstresult=True)
def rlplug_make_profiler(steps: str, tool: str, ranks: str) -> Callback | None:
    """Return the callback that profiles the steps of the section ``profile``, or None; it comes after all others.

    Only a run that wants a profile calls this, before anything is loaded. A ``ConfigError`` refuses the options.
    """
