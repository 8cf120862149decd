"""The phase ``logprobs``: old and reference logprobs and critic values of a step, where the update needs them."""

from __future__ import annotations

from rlplug.distributed.offload import Offload
from rlplug.models.lm_head import TokenLogprobs
from rlplug.training.actor_critic import ActorCritic
from rlplug.training.passes import MicroBatchRunner
from rlplug.training.step_rows import StepRows
from rlplug.types import StepBatch


def compute_logprobs(
    batch: StepBatch, models: ActorCritic, runner: MicroBatchRunner, offload: Offload, step: int, always: bool
) -> tuple[StepBatch, TokenLogprobs | None]:
    """Return the batch with ``old_logprobs``, ``ref_logprobs`` and ``values``, and the policy's logprobs if it ran.

    Args:
        batch: This rank's rows of the step.
        models: Models of the run.
        runner: Runs them over micro-batches.
        offload: Copies the reference policy to the device.
        step: Number of the step, from 1.
        always: Run the policy even where its one update computes the same logprobs anyway.
    """
    tokens = None
    needs_old_logprobs = models.needs_old_logprobs(step, runner.plan.is_on_policy)
    runs_policy = always or needs_old_logprobs or models.shares_trunk
    if not runs_policy and models.reference is None and models.critic is None:
        return batch, None
    rows = StepRows(batch, runner.strategy)
    fetched = runner.fetch(rows, range(rows.num_sequences), "forward")
    if runs_policy:
        output = runner.forward_only(fetched, models.forward_policy)
        tokens = output.tokens
        assert tokens is not None
        batch = batch.with_tokens(old_logprobs=tokens.logprobs if needs_old_logprobs else None, values=output.values)
    if models.reference is not None:
        with offload.reference_on_device():
            output = runner.forward_only(fetched, models.forward_reference)
            batch = batch.with_tokens(ref_logprobs=output.ref_logprobs)
    if models.critic is not None and "values" not in batch.per_token:
        batch = batch.with_tokens(values=runner.forward_only(fetched, models.forward_critic).values)
    return batch, tokens
