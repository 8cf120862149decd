"""The phase ``logprobs``: old and reference logprobs and critic values of a batch, where the update needs them."""

from __future__ import annotations

from rlplug.distributed.offload import Offload
from rlplug.models.lm_head import TokenLogprobs
from rlplug.training.actor_critic import ActorCritic
from rlplug.training.forward_backward import MicroBatchRunner
from rlplug.types import Batch


def compute_logprobs(
    batch: Batch, models: ActorCritic, runner: MicroBatchRunner, offload: Offload, step: int, always: bool
) -> tuple[Batch, TokenLogprobs | None]:
    """Return the batch with ``old_logprobs``, ``ref_logprobs`` and ``values``, and the policy's logprobs if it ran.

    Args:
        batch: Batch of the step, on the CPU of every rank.
        models: Models of the run.
        runner: Runs them over micro-batches.
        offload: Copies the reference policy to the device.
        step: Number of the step, from 1.
        always: Run the policy even where its one update computes the same logprobs anyway.
    """
    tokens = None
    needs_old_logprobs = models.needs_old_logprobs(step, runner.plan.is_on_policy)
    if always or needs_old_logprobs or models.shares_trunk:
        output = runner.forward_only(batch, models.forward_policy)
        tokens = output.tokens
        assert tokens is not None
        batch = batch.replace(old_logprobs=tokens.logprobs if needs_old_logprobs else None, values=output.values)
    if models.reference is not None:
        with offload.reference_on_device():
            output = runner.forward_only(batch, models.forward_reference)
            batch = batch.replace(ref_logprobs=output.ref_logprobs)
    if models.critic is not None and batch.values is None:
        batch = batch.replace(values=runner.forward_only(batch, models.forward_critic).values)
    return batch, tokens
