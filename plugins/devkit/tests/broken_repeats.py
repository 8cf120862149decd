"""Algorithms that compute otherwise again, elsewhere or in other sizes, or that change the process."""

from __future__ import annotations

import os
import socket
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from broken_algorithms import ChangedLoss, Fine
from torch import Tensor

from rlplug.interfaces import Advantages, Denominators, LossOutput, RunInfo
from rlplug.types import Batch, Sample, StepBatch

# ---- again, elsewhere, in other sizes ------------------------------------------------------------------------------


class FadesWithItsCalls(Fine):
    """State that advantages change, and that a checkpoint holds."""

    def centred(self, batch: StepBatch) -> Tensor:
        self.scale *= 0.9
        return self.scale * super().centred(batch)


class DependsOnHashes(Fine):
    """The order of a set of texts, as in groups that are kept by the names of their prompts."""

    def centred(self, batch: StepBatch) -> Tensor:
        order = list({f"group {number}" for number in range(50)})
        return super().centred(batch) * (1 + 0.1 * order.index("group 7"))


class DependsOnItsRank(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        return super().centred(batch) * (1 + 0.1 * int(os.environ.get("RANK", "0")))


class DividesByTheLongest(ChangedLoss):
    """Base of those whose class knows the longest completion of a run."""

    known: ClassVar[dict[str, int]] = {}

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss / self.known["longest"])


class RemembersTheFirstRun(DividesByTheLongest):
    known: ClassVar[dict[str, int]] = {}

    def setup(self, run: RunInfo) -> None:
        self.known.setdefault("longest", run.max_new_tokens)


class KeepsTheLastRun(DividesByTheLongest):
    known: ClassVar[dict[str, int]] = {}

    def setup(self, run: RunInfo) -> None:
        self.known["longest"] = run.max_new_tokens


class LosesItsScaleInAPickle(Fine):
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.scale = 1.0


class KeepsItsRewards(Fine):
    """The mean of the former step's rewards, computed when the next one is there."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = self.last = torch.zeros(1)

    def advantages(self, batch: StepBatch) -> Advantages:
        self.pending = batch.rewards
        return super().advantages(batch)

    def centred(self, batch: StepBatch) -> Tensor:
        return super().centred(batch) * (1 + 0.1 * self.last.mean())

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.last = self.pending

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "last": float(self.last.mean())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.last = state["scale"], torch.tensor([state["last"]])


class SortsItsGroup(Fine):
    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        if isinstance(group, list):
            group.sort(key=lambda sample: sample.reward)
        return group


class ClampsLogprobsInPlace(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        logprobs.data.clamp_(min=-1.0)
        return output


class RecursesOverTokens(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        self.depth(int(batch.num_tokens.max()) if batch.num_sequences else 0)
        return super().advantages(batch)

    def depth(self, number: int) -> int:
        return 0 if number <= 0 else 1 + self.depth(number - 1)


class DeviatesFromNothing(Fine):
    """The deviation of a single completion."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        for group in set(batch.group_index.tolist()):
            rows = batch.group_index == group
            if int(rows.sum()) == 1:
                centred[rows] = batch.rewards[rows] / batch.rewards[rows].std()
        return centred


class ExponentiatesRewards(Fine):
    """A softmax of rewards whose largest is not subtracted."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = torch.zeros_like(batch.rewards)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & batch.reward_valid
            weights = batch.rewards[rows].double().exp()
            if len(weights) > 1:
                centred[rows] = (weights / weights.sum() - 1 / len(weights)).float()
        return centred


class IndexesByGroup(Fine):
    """A table with a row for each of the step's first hundred groups."""

    def centred(self, batch: StepBatch) -> Tensor:
        torch.zeros(100)[batch.group_index]
        return super().centred(batch)


class LogsTokensBackwards(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, per_token={"ratio": logprobs.detach().flip(0)})


class LogsTokensWithAGradient(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, per_token={"ratio": logprobs})


class LeavesOutMetricsOfNothing(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return output if len(logprobs) else replace(output, metrics={})


# ---- the process ---------------------------------------------------------------------------------------------------


class StartsAThread(Fine):
    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()


class KeepsLogprobs(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        self.last = logprobs
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {"scale": self.scale}


class ChangesTheProcess(Fine):
    """Base of those that change something once, when they first look at a step."""

    def centred(self, batch: StepBatch) -> Tensor:
        self.change()
        return super().centred(batch)

    def change(self) -> None:
        raise NotImplementedError


class SetsTheNumberOfThreads(ChangesTheProcess):
    def change(self) -> None:
        torch.set_num_threads(3)


class SetsTheTimeoutOfSockets(ChangesTheProcess):
    def change(self) -> None:
        socket.setdefaulttimeout(7.0)


class SilencesWarnings(ChangesTheProcess):
    def change(self) -> None:
        warnings.simplefilter("ignore", UserWarning)


class SetsTheMask(ChangesTheProcess):
    def change(self) -> None:
        os.umask(0o077)


class WritesBesideItsCode(ChangesTheProcess):
    def change(self) -> None:
        file = Path(__file__).with_name("made-by-a-test.tmp")
        file.write_text("advantages")
        file.unlink(missing_ok=True)  # another rank may have
