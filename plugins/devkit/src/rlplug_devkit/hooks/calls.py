"""Calls of a plugin's hooks as a run makes them, with a core of the kit's own behind them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Final

import pluggy
import torch
from torch import Tensor

from rlplug import hookspecs
from rlplug.interfaces import Advantages, Algorithm, Bucket, Denominators, LossOutput, SyncReport
from rlplug.plugin_manager import hookimpl
from rlplug.types import ONE_RANK, Batch, Rollout, StepBatch, StepStatistics
from rlplug_devkit.algorithms.steps import Row, batch_of

STEP: Final = 7
VERSION: Final = 6
METRICS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "step": float(STEP),
        "loss": -0.25,
        "grad_norm": 0.5,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "completion/num_tokens": 96.0,
        "completion/length_mean": 4.0,
        "policy/entropy": 1.5,
        "filter/kept_share": 1.0,
        "time/step": 2.0,
        "throughput/tokens_per_s": 48.0,
    }
)
"""Metrics of a step, of which a run has these and more."""
INNER: Final = "kit/inner"
"""Metric of the loss of a wrapper within the plugin's."""


class CoreFailure(Exception):
    """What the kit's core raises when it is told to fail."""


class MinusLogprob(Algorithm):
    """Advantages times logprobs, over the number of tokens."""

    def advantages(self, batch: StepBatch) -> Advantages:
        return Advantages(batch.rewards)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.advantages is not None
        objective = (logprobs * micro_batch.advantages).sum()
        return LossOutput(-objective / denominators.num_tokens, {"kit/objective": objective.detach()})


class Core:
    """What the core does in the hooks that a plugin may wrap, counted; it can be told to fail."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.tensors: list[str] = []
        """Names of the tensors that reached the engine."""
        self.fails = False

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self.fails:
            raise CoreFailure(name)

    @hookimpl
    def rlplug_sync_weights(self, engine: Any, buckets: Iterable[Bucket], version: int) -> SyncReport:
        self._called("rlplug_sync_weights")
        self.tensors = [name for bucket in buckets for name, _ in bucket]
        return SyncReport(
            num_bytes=64, num_buckets=2, num_tensors=len(self.tensors), seconds=0.1, policy_version=version
        )

    @hookimpl
    def rlplug_prepare_batch(self, batch: StepBatch) -> StepBatch:
        self._called("rlplug_prepare_batch")
        return batch

    @hookimpl
    def rlplug_compute_loss(
        self, algorithm: Algorithm, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators
    ) -> LossOutput:
        self._called("rlplug_compute_loss")
        return algorithm.loss(micro_batch, logprobs, entropy, denominators)


class Inner:
    """A plugin whose wrappers run within those under test: each leaves a trace in what it returns."""

    @hookimpl(wrapper=True)
    def rlplug_sync_weights(self) -> Generator[None, SyncReport, SyncReport]:
        return dataclasses.replace((yield), policy_version=VERSION + 100)

    @hookimpl(wrapper=True)
    def rlplug_prepare_batch(self) -> Generator[None, StepBatch, StepBatch]:
        batch = yield
        return batch.replace(returns=torch.full((int(batch.num_tokens.sum()),), 0.5))

    @hookimpl(wrapper=True)
    def rlplug_compute_loss(self) -> Generator[None, LossOutput, LossOutput]:
        output = yield
        return dataclasses.replace(output, metrics={**output.metrics, INNER: torch.tensor(1.0)})


class Hooks:
    """A plugin's hooks around a core.

    Args:
        plugin: The module behind the plugin's entry point; ``None`` for the core alone.
        with_inner: Whether a wrapper of another plugin runs within.
    """

    def __init__(self, plugin: ModuleType | None, with_inner: bool = False) -> None:
        self.core = Core()
        self._manager = pluggy.PluginManager("rlplug")
        self._manager.add_hookspecs(hookspecs)
        self._manager.register(self.core)  # pluggy calls the last one first
        if with_inner:
            self._manager.register(Inner())
        if plugin is not None:
            self._manager.register(plugin)

    def sync_weights(self) -> Any:
        """Return the report of a sync of three tensors in two buckets."""
        parts: list[Bucket] = [[("a", torch.ones(2)), ("b", torch.ones(2))], [("c", torch.ones(4))]]
        return self._manager.hook.rlplug_sync_weights(engine=None, buckets=iter(parts), version=VERSION)

    def prepare_batch(self, rows: Sequence[Row], step: StepStatistics = ONE_RANK) -> Any:
        """Return a rank's rows after the hook."""
        return self.prepare(prepared(rows, step))

    def prepare(self, batch: StepBatch) -> Any:
        """Return a batch after the hook."""
        return self._manager.hook.rlplug_prepare_batch(batch=batch, step=STEP)

    def compute_loss(self, micro_batch: Batch, logprobs: Tensor, denominators: Denominators) -> Any:
        """Return the loss of a micro-batch."""
        return self._manager.hook.rlplug_compute_loss(
            algorithm=MinusLogprob(),
            micro_batch=micro_batch,
            logprobs=logprobs,
            entropy=torch.zeros_like(logprobs),
            denominators=denominators,
        )

    def after_rollout(self, rows: Sequence[Row]) -> list[Any]:
        """Return what the plugin returned for a rank's samples: one entry where it has the hook."""
        groups = {row.sample.group for row in rows}
        rollout = Rollout(tuple(row.sample for row in rows), num_groups=len(groups), num_drawn=len(groups))
        found: list[Any] = self._manager.hook.rlplug_after_rollout(rollout=rollout, step=STEP)
        return found

    def after_update(self) -> list[Any]:
        """Return what the plugin returned for the metrics of a step."""
        found: list[Any] = self._manager.hook.rlplug_after_update(metrics=METRICS, step=STEP)
        return found

    def make_tokenizer(self, path: str) -> Any:
        """Return the tokenizer that the plugin makes, or ``None``."""
        return self._manager.hook.rlplug_make_tokenizer(path=path)


def prepared(rows: Sequence[Row], step: StepStatistics = ONE_RANK) -> StepBatch:
    """Return a rank's rows as the hook ``rlplug_prepare_batch`` gets them, with advantages from -5 to 5."""
    batch = batch_of(rows, step=step)
    values = torch.tensor([5.0 * (-1) ** index / (1 + row.sample.group) for index, row in enumerate(rows)])
    return batch.replace(values=None).with_advantages(torch.where(batch.reward_valid, values, 0.0))
