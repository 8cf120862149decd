"""Plugins of hooks with one mistake each, which ``test_hook_sabotage.py`` runs through their kit."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Callable, Generator, Mapping
from types import ModuleType
from typing import Any

import torch
from rlplug_rewards.text import ExactMatch

from rlplug.interfaces import Bucket, Denominators, LossOutput, SyncReport
from rlplug.plugin_manager import hookimpl
from rlplug.registry import Registry
from rlplug.types import Batch, Rollout, StepBatch

wrapper = hookimpl(wrapper=True)
plugins: dict[str, ModuleType] = {}
"""Modules by the names of their mistakes."""


def plugin(name: str, *functions: Callable[..., Any], api: str = ">=3,<4") -> ModuleType:
    """Return a plugin that has the hooks of ``Fine``, but for those that are given."""
    module = ModuleType(f"broken_{name}")
    module.RLPLUG_API_VERSION = api  # type: ignore[attr-defined]
    for function in (*FINE, *functions):
        setattr(module, function.__name__, function)
    sys.modules[module.__name__] = plugins[name] = module
    return module


def mistake(name: str, mark: Any = wrapper) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: a plugin of that name has the function in place of the fine one."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        plugin(name, mark(function))
        return function

    return add


# ---- a plugin without mistakes ------------------------------------------------------------------------------------


@hookimpl
def rlplug_register_rewards(registry: Registry) -> None:
    registry.add("rewards", ExactMatch)


@hookimpl
def rlplug_after_rollout(rollout: Rollout) -> Mapping[str, float]:
    return {"made/turns": float(sum(sample.num_turns for sample in rollout.samples)) / len(rollout.samples)}


@hookimpl
def rlplug_after_update(metrics: Mapping[str, float]) -> Mapping[str, float]:
    return {"made/loss": metrics["loss"]}


@wrapper
def rlplug_sync_weights() -> Generator[None, SyncReport, SyncReport]:
    report = yield
    return dataclasses.replace(report, num_bytes=report.num_bytes + 1)


@wrapper
def rlplug_prepare_batch() -> Generator[None, StepBatch, StepBatch]:
    batch = yield
    assert batch.advantages is not None
    return batch.replace(advantages=batch.advantages.clamp(-1, 1))


@wrapper
def rlplug_compute_loss(micro_batch: Batch, denominators: Denominators) -> Generator[None, LossOutput, LossOutput]:
    output = yield
    tokens = micro_batch.num_tokens.sum() / denominators.num_tokens
    return dataclasses.replace(output, metrics={**output.metrics, "made/tokens": tokens})


@hookimpl
def rlplug_make_tokenizer(path: str) -> Any:
    return None


FINE = (
    rlplug_register_rewards,
    rlplug_after_rollout,
    rlplug_after_update,
    rlplug_sync_weights,
    rlplug_prepare_batch,
    rlplug_compute_loss,
    rlplug_make_tokenizer,
)
plugin("Fine")

# ---- mistakes -----------------------------------------------------------------------------------------------------

plugin("IsForAnotherApi", api=">=1,<2")


@mistake("MisspellsAnArgument")
def rlplug_prepare_batch(rows: StepBatch) -> Generator[None, StepBatch, StepBatch]:
    return (yield)


def once() -> Callable[..., None]:
    seen: list[int] = []

    def rlplug_register_rewards(registry: Registry) -> None:
        if not seen:
            registry.add("rewards", ExactMatch)
        seen.append(1)

    return rlplug_register_rewards


plugin("RegistersOnce", hookimpl(once()))


@mistake("NeedsAMetric", hookimpl)
def rlplug_after_update(metrics: Mapping[str, float]) -> Mapping[str, float]:
    return {"made/kl": metrics["policy/kl"]}


@mistake("YieldsTwice")
def rlplug_compute_loss() -> Generator[None, LossOutput, LossOutput]:
    yield
    return (yield)


@mistake("ForgetsToReturn")
def rlplug_prepare_batch() -> Generator[None, StepBatch, Any]:
    yield


@mistake("DropsRows")
def rlplug_prepare_batch() -> Generator[None, StepBatch, StepBatch]:
    batch = yield
    return batch.select(range(max(batch.num_sequences - 1, 0)))


@mistake("ReadsTheBuckets")
def rlplug_sync_weights(buckets: Any) -> Generator[None, SyncReport, SyncReport]:
    num_tensors = sum(len(bucket) for bucket in buckets)
    report = yield
    return dataclasses.replace(report, num_tensors=num_tensors)


@mistake("ReadsOneBucket")
def rlplug_sync_weights(buckets: Any) -> Generator[None, SyncReport, SyncReport]:
    _first: Bucket = next(iter(buckets))
    return (yield)


@mistake("MakesAReportOfItsOwn")
def rlplug_sync_weights(version: int) -> Generator[None, SyncReport, SyncReport]:
    report = yield
    return SyncReport(report.num_bytes, report.num_buckets, report.num_tensors, 1.0, version)


@mistake("LosesMetrics")
def rlplug_compute_loss() -> Generator[None, LossOutput, LossOutput]:
    output = yield
    return LossOutput(output.loss, {"made/loss": output.loss.detach()})


@mistake("SwallowsErrors")
def rlplug_sync_weights(version: int) -> Generator[None, SyncReport, SyncReport]:
    try:
        report = yield
    except Exception:  # noqa: BLE001 - the mistake
        return SyncReport(0, 0, 0, 0.0, version)
    return report


def not_reentrant() -> Callable[..., Any]:
    inside: list[int] = []

    def rlplug_sync_weights() -> Generator[None, SyncReport, SyncReport]:
        if inside:
            raise RuntimeError("a sync is running")
        inside.append(1)
        report = yield
        inside.clear()
        return report

    return rlplug_sync_weights


plugin("StaysInsideAfterAnError", wrapper(not_reentrant()))


@mistake("ReturnsAText", hookimpl)
def rlplug_after_update() -> Any:
    return {"made/state": "fine"}


@mistake("ReturnsNaN", hookimpl)
def rlplug_after_rollout(rollout: Rollout) -> Mapping[str, float]:
    lengths = torch.tensor([s.num_response_tokens for s in rollout.samples if s.finish_reason == "no such"])
    return {"made/length": float(lengths.float().mean())}


@mistake("ReplacesTheMeanReward", hookimpl)
def rlplug_after_update() -> Mapping[str, float]:
    return {"reward/mean": 42.0}


@mistake("NormalisesPerRank")
def rlplug_prepare_batch() -> Generator[None, StepBatch, StepBatch]:
    batch = yield
    assert batch.advantages is not None
    size = batch.advantages.abs().mean() if batch.num_sequences else 1.0
    return batch.replace(advantages=batch.advantages / size)


@mistake("SkipsEmptyRanks")
def rlplug_prepare_batch() -> Generator[None, StepBatch, StepBatch]:
    batch = yield
    return batch.replace(returns=torch.zeros(int(batch.num_tokens.sum()))) if batch.num_sequences else batch


@mistake("AsksWhereItHasRows")
def rlplug_prepare_batch() -> Generator[None, StepBatch, StepBatch]:
    batch = yield
    assert batch.advantages is not None
    if not batch.num_sequences:
        return batch
    return batch.replace(advantages=batch.advantages - batch.step.mean(batch.advantages))


@mistake("CountsWhatIsThere", hookimpl)
def rlplug_after_rollout(rollout: Rollout) -> Mapping[str, float]:
    return {f"made/group_{sample.group}": 1.0 for sample in rollout.samples}


@mistake("AveragesOverItsMicroBatch")
def rlplug_compute_loss(micro_batch: Batch) -> Generator[None, LossOutput, LossOutput]:
    output = yield
    assert micro_batch.advantages is not None
    mean = micro_batch.advantages.abs().mean()
    return dataclasses.replace(output, metrics={**output.metrics, "made/advantage": mean})


@mistake("ClampsInPlace")
def rlplug_prepare_batch() -> Generator[None, StepBatch, StepBatch]:
    batch = yield
    assert batch.advantages is not None
    batch.advantages.clamp_(-1, 1)
    return batch


@mistake("ScalesTheMicroBatch")
def rlplug_compute_loss(micro_batch: Batch) -> Generator[None, LossOutput, LossOutput]:
    output = yield
    assert micro_batch.advantages is not None
    micro_batch.advantages.mul_(0.5)
    return output


@mistake("DrawsGlobally", hookimpl)
def rlplug_after_update() -> Mapping[str, float]:
    return {"made/noise": random.random()}


@mistake("LeavesAnEnvironmentVariable", hookimpl)
def rlplug_after_update(step: int) -> None:
    os.environ["MADE_STEP"] = f"{step}-{len(os.environ.get('MADE_STEP', ''))}"


@mistake("LeavesGradientsOffAfterAnError")
def rlplug_sync_weights() -> Generator[None, SyncReport, SyncReport]:
    torch.set_grad_enabled(False)
    report = yield
    torch.set_grad_enabled(True)
    return report


@mistake("TakesAllTokenizers", hookimpl)
def rlplug_make_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


# ---- what the kit does not catch ----------------------------------------------------------------------------------


@mistake("HalvesAdvantages")
def rlplug_prepare_batch() -> Generator[None, StepBatch, StepBatch]:
    """Another number than the author meant."""
    batch = yield
    assert batch.advantages is not None
    return batch.replace(advantages=0.5 * batch.advantages)


@mistake("SumsOverItsRank", hookimpl)
def rlplug_after_rollout(rollout: Rollout) -> Mapping[str, float]:
    """A sum, of which the run logs the mean over ranks."""
    return {"made/samples": float(len(rollout.samples))}
