"""Algorithms with one mistake each, which ``test_algorithm_sabotage.py`` runs through their kit."""

from __future__ import annotations

import os
import random
import socket
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from rlplug_devkit import AlgorithmConformance
from torch import Tensor

from rlplug.interfaces import Advantages, Algorithm, Denominators, LossOutput, Needs, RunInfo
from rlplug.types import Batch, Sample, StepBatch

NUM_THREADS = torch.get_num_threads()
UMASK = os.umask(0)
os.umask(UMASK)


def present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


class Fine(Algorithm):
    """Rewards less their group's mean, a clipped ratio, a critic, and a scale that follows the mean of the ratio."""

    def __init__(self) -> None:
        self.scale = 1.0

    @property
    def needs(self) -> Needs:
        return Needs(groups=True, critic=True)

    def advantages(self, batch: StepBatch) -> Advantages:
        centred = self.centred(batch)
        values = present(batch.tokens.values)
        metrics = {"made/size": batch.step.mean(centred.abs()), "made/value": batch.step.mean(values)}
        return Advantages(centred, returns=batch.spread(batch.rewards), metrics=metrics)

    def centred(self, batch: StepBatch) -> Tensor:
        centred = torch.zeros_like(batch.rewards)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & self.counts(batch)
            rewards = batch.rewards[rows]
            if len(rewards) > 1 and rewards.max() > rewards.min():
                centred[rows] = rewards - rewards.mean()
        return centred

    def counts(self, batch: StepBatch) -> Tensor:
        return batch.reward_valid

    def ratio(self, difference: Tensor) -> Tensor:
        return difference.clamp(-20, 20).exp()

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.advantages is not None
        assert micro_batch.old_logprobs is not None
        ratio = self.ratio(logprobs - micro_batch.old_logprobs)
        objective = (ratio.clamp(max=2.0) * micro_batch.advantages).sum()
        mean = ratio.detach().sum() / max(denominators.num_tokens, 1)
        return LossOutput(-self.scale * objective / max(denominators.num_tokens, 1), {"made/ratio": mean})

    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        assert micro_batch.returns is not None
        squares = (values - micro_batch.returns).square().sum()
        return LossOutput(squares / max(denominators.num_tokens, 1))

    def after_step(self, metrics: Mapping[str, float]) -> None:
        self.scale = 0.9 * self.scale + 0.1 * metrics["made/ratio"]

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = state["scale"]


# ---- advantages ---------------------------------------------------------------------------------------------------


class RaisesInAdvantages(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        raise KeyError("kl")


class ReadsUndeclaredOldLogprobs(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        assert batch.tokens.old_logprobs is not None
        return super().advantages(batch)


class ReadsUndeclaredRolloutLogprobs(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        assert result.of_sequences is not None
        return replace(
            result, of_sequences=result.of_sequences * batch.tokens.sums(batch.tokens.rollout_logprobs).exp()
        )


class ReturnsDoubles(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        assert result.of_sequences is not None
        return replace(result, of_sequences=result.of_sequences.double())


class ForgetsReturns(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        return replace(super().advantages(batch), returns=None)


class ReturnsNaN(Fine):
    """0 / 0 in a group of equal rewards."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & batch.reward_valid
            if int(rows.sum()):
                centred[rows] = centred[rows] / batch.rewards[rows].std(unbiased=False)
        return centred


class ReturnsATextMetric(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        return replace(super().advantages(batch), metrics={"made/size": "large"})  # type: ignore[dict-item]


class SelectsCopies(Fine):
    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        return [replace(sample, reward=sample.reward + 1) for sample in group]


class SelectsTwice(Fine):
    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        return [*group, max(group, key=lambda sample: sample.reward)]


class SelectsByItsCalls(Fine):
    calls = 0

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        self.calls += 1
        return group[: 1 + self.calls % 3]


class DrawsPerObject(Fine):
    def __init__(self) -> None:
        super().__init__()
        self.noise = random.Random().random()

    def centred(self, batch: StepBatch) -> Tensor:
        return super().centred(batch) * self.noise


class WritesIntoRewards(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        batch.rewards.mul_(0.5)
        return centred


class CountsFailedRewards(Fine):
    def counts(self, batch: StepBatch) -> Tensor:
        return torch.ones_like(batch.reward_valid)


class TrainsOnFailedRewards(Fine):
    """They do not count in the mean, and get an advantage all the same."""

    def centred(self, batch: StepBatch) -> Tensor:
        return torch.where(batch.reward_valid, super().centred(batch), -1.0)


class FavoursTheFirst(Fine):
    """The first completion of a group is its baseline."""

    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        for group in set(batch.group_index.tolist()):
            rows = ((batch.group_index == group) & batch.reward_valid).nonzero().flatten()
            if len(rows):
                centred[rows] = batch.rewards[rows] - batch.rewards[rows[0]]
        return centred


class NeedsCompletions(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        batch.rewards.max()
        return super().advantages(batch)


class NeedsRewards(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        moments = batch.step.moments(batch.rewards, batch.reward_valid)
        return replace(result, metrics={"made/best": moments.largest})


class NormalisesPerRank(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        centred = super().centred(batch)
        return centred / (centred.abs().mean() + 1e-6) if len(centred) else centred


class MeasuresItsRank(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        return replace(result, metrics={"made/completions": float(batch.num_sequences)})


class AsksWhereItHasCompletions(Fine):
    """A rank without completions does not come to the meeting."""

    def advantages(self, batch: StepBatch) -> Advantages:
        if not batch.num_sequences:
            return Advantages(batch.rewards.clone(), returns=torch.zeros(0))
        return super().advantages(batch)


class BlowsUpRoundOff(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        centred = torch.zeros_like(batch.rewards)
        for group in set(batch.group_index.tolist()):
            rows = (batch.group_index == group) & batch.reward_valid
            rewards = batch.rewards[rows]
            if len(rewards) > 1:
                centred[rows] = rewards - 0.999 * rewards.mean()
        return centred


# ---- losses -------------------------------------------------------------------------------------------------------


class RaisesInLoss(Fine):
    def ratio(self, difference: Tensor) -> Tensor:
        raise RuntimeError("a shape")


class ForgetsTheValueLoss(Fine):
    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        return Algorithm.value_loss(self, micro_batch, values, denominators)


class ChangedLoss(Fine):
    """Base of those that change what ``Fine.loss`` returns."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        raise NotImplementedError

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return self.changed(output, micro_batch, logprobs, denominators)


class DetachesLogprobs(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss.detach())


class ReturnsTheLossOfTokens(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss.expand(2))


class ReturnsADoubleLoss(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss.double())


class KeepsTheGraphInMetrics(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, metrics={**output.metrics, "made/loss": output.loss})


class ZeroesAdvantagesInPlace(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        assert batch.advantages is not None
        batch.advantages.data.clamp_(-0.1, 0.1)
        return output


class DividesByItsOwnTokens(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        own = batch.num_tokens.sum().clamp(min=1)
        return replace(output, loss=output.loss * max(denominators.num_tokens, 1) / own)


class NormalisesInTheMicroBatch(ChangedLoss):
    """Advantages are divided by their largest in the micro-batch."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        assert batch.advantages is not None
        largest = torch.cat([batch.advantages.abs(), torch.tensor([1e-3])]).max()
        return replace(output, loss=output.loss / largest)


class AddsAConstant(ChangedLoss):
    """A term of the step, as large in each row that is there: halves with the denominators, and adds up over rows."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=output.loss + batch.num_sequences / max(denominators.num_tokens, 1))


class ClampsAfterExp(Fine):
    def ratio(self, difference: Tensor) -> Tensor:
        return difference.exp()


class HasTheWrongSign(ChangedLoss):
    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        return replace(output, loss=-output.loss)


# ---- state --------------------------------------------------------------------------------------------------------


class DrawsGlobally(Fine):
    def centred(self, batch: StepBatch) -> Tensor:
        torch.rand(1)
        return super().centred(batch)


class KeepsATensor(Fine):
    def state_dict(self) -> dict[str, Any]:
        return {"scale": torch.tensor(self.scale)}


class ForgetsItsScale(Fine):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class LoadsTheDefault(Fine):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale = 1.0


class SelectsByAnUnsavedStep(Fine):
    steps = 0

    def select(self, group: Sequence[Sample]) -> Sequence[Sample]:
        return group if self.steps < 4 else group[:2]

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.steps += 1


class RaisesAfterAStep(Fine):
    def after_step(self, metrics: Mapping[str, float]) -> None:
        raise KeyError("kl")


class WritesIntoMetrics(Fine):
    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        metrics.pop("step")  # type: ignore[attr-defined]


class ChangesAfterAHundredSteps(Fine):
    """State that matters late and is not saved."""

    steps = 0

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.steps += 1
        if self.steps > 100:
            self.scale = 0.0


class HandsOutItsList(Fine):
    """The list in a checkpoint grows with the run."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def after_step(self, metrics: Mapping[str, float]) -> None:
        super().after_step(metrics)
        self.history.append(metrics["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.history = state["scale"], list(state["history"])


# ---- claims -------------------------------------------------------------------------------------------------------


class NeedsMoreLater(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, reference_policy=self.scale != 1.0)


class ReadsTheReferenceIfThere(ChangedLoss):
    """A penalty that is never there, because nothing asks for the reference."""

    def changed(self, output: LossOutput, batch: Batch, logprobs: Tensor, denominators: Denominators) -> LossOutput:
        if batch.ref_logprobs is None:
            return output
        penalty = (logprobs - batch.ref_logprobs).square().sum() / max(denominators.num_tokens, 1)
        return replace(output, loss=output.loss + penalty)


class AddsAnEntropyBonus(Fine):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return replace(output, loss=output.loss - 0.01 * entropy.sum() / max(denominators.num_tokens, 1))


class NeedsAReferenceForNothing(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, reference_policy=True)


class NeedsOldLogprobsForNothing(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, old_logprobs=True)


class NeedsEntropyForNothing(Fine):
    @property
    def needs(self) -> Needs:
        return replace(super().needs, entropy_gradient=True)


class NeverAsksItsCritic(Fine):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        return replace(result, metrics={"made/size": result.metrics["made/size"]})


class RefusesNoRun(Fine):
    """A group of one has no baseline, and ``needs.groups`` does not say so."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, groups=False)


class LeavesOutTheLastToken(Fine):
    """Off by one: sums end a token early."""

    def ratio(self, difference: Tensor) -> Tensor:
        return super().ratio(difference)

    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        ends = micro_batch.num_tokens.cumsum(0)[micro_batch.num_tokens > 0] - 1
        is_last = torch.zeros_like(logprobs, dtype=torch.bool).index_fill(0, ends, value=True)
        return super().loss(micro_batch, torch.where(is_last, logprobs.detach(), logprobs), entropy, denominators)


class FreezesItsCritic(Fine):
    """All values are detached but those of completions of a single token."""

    def value_loss(self, micro_batch: Batch, values: Tensor, denominators: Denominators) -> LossOutput:
        is_alone = micro_batch.num_tokens[micro_batch.sequence_index] == 1
        return super().value_loss(micro_batch, torch.where(is_alone, values, values.detach()), denominators)


class DetachesItsPenalty(NeedsAReferenceForNothing):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        penalty = (logprobs.detach() - present(micro_batch.ref_logprobs)).square().sum()
        return replace(output, loss=output.loss + 0.1 * penalty / max(denominators.num_tokens, 1))


class Streamed(Fine):
    """Needs no critic, and its groups stand alone."""

    @property
    def needs(self) -> Needs:
        return Needs(groups=True)

    @property
    def streamed_divisor(self) -> Literal["num_tokens", "num_sequences"] | None:
        return "num_tokens"

    def advantages(self, batch: StepBatch) -> Advantages:
        centred = self.centred(batch)
        return Advantages(centred, metrics={"made/size": batch.step.mean(centred.abs())})


class StreamsACritic(Fine):
    @property
    def streamed_divisor(self) -> Literal["num_tokens", "num_sequences"] | None:
        return "num_tokens"


class StreamsWhatIsNormalised(Streamed):
    def advantages(self, batch: StepBatch) -> Advantages:
        result = super().advantages(batch)
        assert result.of_sequences is not None
        deviation = batch.step.moments(result.of_sequences, batch.reward_valid).std
        return replace(result, of_sequences=result.of_sequences / (deviation + 1e-3))


class StreamsByTwoCounts(Streamed):
    def loss(self, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators) -> LossOutput:
        output = super().loss(micro_batch, logprobs, entropy, denominators)
        return replace(output, loss=output.loss + 0.07 * logprobs.sum() / max(denominators.num_sequences, 1))


class AssertsInSetup(Fine):
    def setup(self, run: RunInfo) -> None:
        assert run.group_size <= 16, "too large"


# ---- again, elsewhere, in other sizes -----------------------------------------------------------------------------


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


# ---- the process --------------------------------------------------------------------------------------------------


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
        file.unlink()


# ---- what the kit does not catch ----------------------------------------------------------------------------------


class HalvesItsAdvantages(Fine):
    """Another equation than the paper's."""

    def centred(self, batch: StepBatch) -> Tensor:
        return 0.5 * super().centred(batch)


class AlgorithmTests(AlgorithmConformance):
    algorithm: ClassVar[type[Algorithm]]

    def make_algorithm(self) -> Algorithm:
        return self.algorithm()

    @classmethod
    def teardown_class(cls) -> None:
        """Undo what mistakes left in the process, which is that of all tests."""
        torch.set_num_threads(NUM_THREADS)
        socket.setdefaulttimeout(None)
        os.umask(UMASK)
