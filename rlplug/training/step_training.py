"""How the groups of a step train: all together, once they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from rlplug.distributed.offload import Offload
from rlplug.models.lm_head import TokenLogprobs
from rlplug.training.passes import compute_logprobs
from rlplug.training.update import PolicyUpdate, UpdateResult
from rlplug.types import Rollout, Sample, StepBatch


class StepTraining:
    """Trains on the groups of each step together. A source of groups may bring a class that does so as they complete.

    Args:
        update: Takes the optimizer steps.
        offload: Copies the reference policy to the device.
        make_batch: Returns samples as a batch.
        phase: Makes a context that times a phase of the step, by its name.
    """

    def __init__(
        self,
        update: PolicyUpdate,
        offload: Offload,
        make_batch: Callable[[Sequence[Sample]], StepBatch],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._update, self._offload = update, offload
        self._make_batch, self._phase = make_batch, phase

    def add(self, rollout: Rollout, step: int, is_first_step: bool, awaits_groups: bool) -> None:
        """Run what can run before all groups are there, over those that ``rollout`` has gained. Collective.

        ``is_first_step`` is of this process, and ``awaits_groups`` whether other groups are still generated.
        """

    def logprobs(self, rollout: Rollout, step: int, is_first_step: bool) -> tuple[StepBatch, TokenLogprobs | None]:
        """Return this rank's rows of the step, and the trainer's logprobs of them, where it computed them now."""
        batch, update = self._make_batch(rollout.samples), self._update
        return compute_logprobs(batch, update.models, update.runner, self._offload, step, is_first_step)

    def require_advantages(self, batch: StepBatch) -> None:
        """Check that groups which have trained already had the advantages that ``batch`` has. Collective."""

    @property
    def run(self) -> Callable[[StepBatch, int], UpdateResult]:
        """Takes the step's optimizer steps, given its rows with advantages and its number. Collective."""
        return self._update.run

    def discard(self) -> None:
        """Forget a step that ends before its update."""
