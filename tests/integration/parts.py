"""Parts that go wrong, named by their import path in the tests' command lines."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Timer
from rlplug_algos.grpo import GRPO

from examples.hidden_digit.environment import HiddenDigit
from rlplug.errors import RunError
from rlplug.interfaces import EngineCapabilities, EngineFault, LossOutput, Optimization, Reward, StepResult
from rlplug.interfaces.optimization import Effect
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import RewardError, Sample


def raises(completion: str) -> float:
    raise KeyError("no such unit test")


def hangs(completion: str) -> float:
    time.sleep(3600)
    return 0.0


def rare(completion: str) -> float:
    """Return 1 for about a third of all texts: groups with and without a difference are in each step."""
    return float(sum(map(ord, completion)) % 7 < 2)


def not_a_number(completion: str) -> float:
    return float("nan")


class PlacedReward(Reward):
    """A reward of 0 that needs a device, says so, and counts what it scores; its weight leaves rewards as they are."""

    batch_size = 1 << 20
    device: torch.device | None = None
    num_scored = 0

    def __init__(self) -> None:
        super().__init__(weight=0.0, name="placed")

    def place(self, device: torch.device) -> None:
        self.device = device

    def notes(self) -> list[str]:
        return [f"placed: on {self.device}"]

    def score(self, samples: Sequence[Sample]) -> list[float | RewardError]:
        assert self.device is not None
        self.num_scored += len(samples)
        return [0.0] * len(samples)

    def pop_counts(self) -> dict[str, float]:
        counts, self.num_scored = {"scored": self.num_scored, "cost": self.num_scored / 8}, 0
        return counts


class SecondLossIsNaN(GRPO):
    """GRPO, but for its second loss."""

    num_losses = 0

    def loss(self, *arguments, **keywords) -> LossOutput:  # type: ignore[no-untyped-def]
        result = super().loss(*arguments, **keywords)
        self.num_losses += 1
        return LossOutput(result.loss * torch.nan, result.metrics) if self.num_losses == 2 else result


class Silent(HFRollout):
    """An engine that says it returns no logprobs."""

    capabilities = EngineCapabilities(logprobs=False)


class BFloat16Engine(HFRollout):
    """An engine that rounds weights and activations to bfloat16, whatever the trainer does."""

    def start(self, policy, placement):  # type: ignore[no-untyped-def]
        super().start(policy, placement)
        self._model.to(torch.bfloat16)


class TakesWeightsOnce(HFRollout):
    """An engine that keeps the weights of its first sync."""

    has_weights = False

    def update_weights(self, buckets, version):  # type: ignore[no-untyped-def]
        kept = {name: weight.clone() for name, weight in self._model.named_parameters()}
        report = super().update_weights(buckets, version)
        if self.has_weights:
            for name, weight in self._model.named_parameters():
                weight.data.copy_(kept[name])
        self.has_weights = True
        return report


class StampsAnOldVersion(HFRollout):
    """An engine whose completions say that they are of other weights, which the mismatch gate would leave out."""

    def generate(self, requests, sampling):  # type: ignore[no-untyped-def]
        return [replace(each, policy_version=-1) for each in super().generate(requests, sampling)]


class LearnsItsContext(HFRollout):
    """An engine that knows only once it has started that its context is short, as of servers."""

    context_key = "rollout.some_length"
    has_started = False

    def start(self, policy, placement):  # type: ignore[no-untyped-def]
        super().start(policy, placement)
        self.has_started = True

    def max_context(self, policy):  # type: ignore[no-untyped-def]
        return 6 if self.has_started else super().max_context(policy)


class NeverReturns(HFRollout):
    """An engine that waits for something that does not come."""

    def generate(self, requests, sampling):  # type: ignore[no-untyped-def]
        time.sleep(3600)


class LosesAKey(GRPO):
    """GRPO with a bug."""

    def loss(self, *arguments, **keywords) -> LossOutput:  # type: ignore[no-untyped-def]
        return {}["kl"]  # type: ignore[no-any-return]


class TroubledDigit(HiddenDigit):
    """The game, whose every tenth call raises, and which hangs in the fiftieth; calls are counted over all games."""

    calls = itertools.count(1)

    def step(self, completion: str) -> StepResult:
        number = next(self.calls)
        if number == 50:
            time.sleep(3600)
        if number % 10 == 0:
            raise ConnectionError("the game server is gone")
        return super().step(completion)


class DiesOnce(HFRollout):
    """An engine that dies in its third call, in the middle of trajectories, with a part of the turns."""

    num_calls = 0

    def generate(self, requests, sampling):  # type: ignore[no-untyped-def]
        DiesOnce.num_calls += 1
        completions = super().generate(requests, sampling)
        if DiesOnce.num_calls == 3:
            raise EngineFault("it died.", completions[: len(completions) // 2])
        return completions


LACK = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is "
    "free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the allocated memory 70.25 GiB "
    "is allocated by PyTorch, and 6.50 GiB is reserved by PyTorch but unallocated."
)
"""What torch 2.13 says on a GPU."""


class LacksMemoryOnLastRank(GRPO):
    """GRPO whose loss finds no memory on the last rank, while the others go on."""

    def loss(self, *arguments, **keywords) -> LossOutput:  # type: ignore[no-untyped-def]
        if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            raise torch.OutOfMemoryError(LACK)
        return super().loss(*arguments, **keywords)


class LacksMemoryToScore(Optimization):
    """An optimization whose passes without gradients find no memory for cuBLAS."""

    def before_shard(self, model: torch.nn.Module) -> None:
        passes = itertools.count()

        def refuse(*_: object) -> None:
            if not torch.is_grad_enabled() and next(passes) >= 2:  # the first are those of a check before the run
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

        model.register_forward_pre_hook(refuse)

    def effects(self) -> list[Effect]:
        return [Effect("it refuses")]


class LacksMemoryToGenerate(HFRollout):
    """An engine that finds no memory, which it says as its plugin does of all that goes wrong in its library."""

    def generate(self, requests, sampling):  # type: ignore[no-untyped-def]
        try:
            raise torch.OutOfMemoryError(LACK)
        except torch.OutOfMemoryError as problem:
            raise RunError(f"the engine failed: {type(problem).__name__}") from problem


class KilledInSecondStep(Callback):
    """The process of a new run kills itself in the second step, once the checkpoint of the first is there."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if pl_module.rollout_step == 1 and "--run.dir" in sys.argv:
            run_dir = Path(sys.argv[sys.argv.index("--run.dir") + 1])
            while not (run_dir / "001" / "checkpoints" / "step-00000001" / "manifest.json").is_file():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


class TimePassesInSecondStep(Callback):
    """The second step of a run takes longer than any ``trainer.max_time`` of a test, by the clock of that option."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if pl_module.rollout_step == 1:
            (timer,) = [each for each in trainer.callbacks if isinstance(each, Timer)]
            timer.load_state_dict({"time_elapsed": {"train": 1e6}})
