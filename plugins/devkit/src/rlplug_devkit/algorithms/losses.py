"""Checks of an algorithm's losses, of policy and critic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rlplug.errors import describe
from rlplug.interfaces.algorithm import Denominators, LossOutput
from rlplug_devkit.algorithms.checks import SEEDS, AlgorithmChecks
from rlplug_devkit.algorithms.passes import (
    Learned,
    Step,
    difference,
    is_close,
    learn,
    learn_micro_batch,
    outputs_of,
    unreached,
)
from rlplug_devkit.algorithms.steps import Row, contrasting_rows, is_alone
from rlplug_devkit.tasks.calls import NOT_COMPARED

EXTREME = 90.0
"""Nats between policy and old policy: exp of it is infinite in float32."""
FAR = np.float32(30.0)
"""Factor that takes numbers of a step beyond the limits of a loss."""


class LossChecks(AlgorithmChecks):
    """Checks of ``loss`` and ``value_loss``."""

    def _learned(self, step: Step, rows: Sequence[int] | None = None) -> Learned:
        """Return the losses of a micro-batch; skip the check where they cannot be computed."""
        try:
            return learn(step, step.all_rows if rows is None else rows)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)

    def _outputs(self) -> dict[str, LossOutput]:
        """Return what the losses return of a step as one micro-batch, by the names of their methods."""
        step = self._step(self._rows())
        leaves = {name: leaf.requires_grad_() for name, leaf in step.trained_leaves.items()}
        return outputs_of(step.algorithm, step.batch.tokens, leaves, step.denominators)

    def test_losses_can_be_computed(self) -> None:
        try:
            self._outputs()
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(
                f"loss or value_loss raised {describe(error)}. It has what `needs` declares, besides rewards, "
                "advantages, returns and old_logprobs.",
                pytrace=False,
            )

    def test_losses_are_well_formed(self) -> None:
        """Scalars, of which the policy's has a gradient to logprobs alone, and the critic's to values."""
        try:
            outputs = self._outputs()
        except Exception:  # noqa: BLE001 - the check above
            pytest.skip(NOT_COMPARED)
        for name, output in outputs.items():
            assert isinstance(output, LossOutput), f"{name} returned a {type(output).__name__}: return a LossOutput."
            named = {"loss": output.loss, **output.metrics, **output.maxima, **output.minima}
            for part, tensor in named.items():
                is_scalar = isinstance(tensor, torch.Tensor) and tensor.dim() == 0
                assert is_scalar, f"{part} of {name} is no tensor of a single number: sum over the tokens that train."
            wrong = [part for part, tensor in named.items() if tensor.dtype != torch.float32]
            assert not wrong, f"{wrong} of {name} are {named[wrong[0]].dtype}: they must be float32."
            assert output.loss.requires_grad, (
                f"{name} has no gradient: nothing would be learned. Keep logprobs and values attached."
            )
            assert bool(output.loss.isfinite()), f"{name} is {float(output.loss)}."
            attached = [part for part, tensor in named.items() if part != "loss" and tensor.requires_grad]
            assert not attached, f"the metrics {attached} of {name} have gradients: detach() them, or they keep memory."

    def test_the_micro_batch_is_left_as_it_was(self) -> None:
        """Of usual numbers, and of those that a limit cuts."""
        rows = self._rows()
        for step in (self._step(rows), self._step([_far_apart(row) for row in rows])):
            micro_batch = step.batch.tokens
            kept = {name: tensor.clone() for name, tensor in micro_batch.tensors().items()}
            try:
                learn_micro_batch(step.algorithm, micro_batch, step.trained_leaves, step.denominators)
            except Exception:  # noqa: BLE001 - a check of its own
                pytest.skip(NOT_COMPARED)
            changed = [name for name, tensor in micro_batch.tensors().items() if not tensor.equal(kept[name])]
            changed = [name for name in changed if not bool(kept[name].isnan().any())]  # not there: NaN
            assert not changed, f"the loss wrote into {changed} of the micro-batch, which the next epoch reads again."

    def test_losses_divide_by_the_denominators(self) -> None:
        """With twice the counts, a micro-batch's term is half as large."""
        for seed in SEEDS:
            step = self._step(self._rows(seed))
            once, counts = self._learned(step), step.denominators
            twice = learn(step, step.all_rows, Denominators(2 * counts.num_tokens, 2 * counts.num_sequences))
            assert is_close(2 * twice.loss, once.loss, self.tolerance), (
                f"with denominators twice as large the loss goes from {float(once.loss):.6g} to "
                f"{float(twice.loss):.6g}, and not to half: divide by `denominators`, never by a count of the "
                "micro-batch, such as mean() does."
            )

    def test_micro_batches_add_up(self) -> None:
        """However a mini-batch is split, the loss, its gradients and the metrics are the same."""
        for seed, size in zip(SEEDS, (1, 3, 5), strict=True):
            step = self._step(self._rows(seed))
            whole, order = self._learned(step), np.random.default_rng(seed).permutation(step.all_rows).tolist()
            total, *others = [self._learned(step, order[i : i + size]) for i in range(0, len(order), size)]
            for part in others:
                total.add(part)
            found = difference(total, whole, self.tolerance)
            assert not found, (
                f"in micro-batches of {size} rows {found}: a term must not depend on other rows of its micro-batch, "
                "nor on its padding."
            )

    def test_a_filler_adds_nothing(self) -> None:
        """A rank without rows repeats some, of which no token trains, so that all ranks run as many passes."""
        step = self._step(self._rows())
        some = step.batch.select([0, 1])
        filler = some.replace(response_mask=torch.zeros(int(some.num_tokens.sum()), dtype=torch.bool)).tokens
        try:
            learned = learn_micro_batch(
                step.algorithm, filler, {name: torch.zeros(0) for name in step.leaves}, step.denominators
            )
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"a micro-batch of which no token trains: {describe(error)}", pytrace=False)
        numbers = {"the loss": float(learned.loss), **learned.metrics}
        wrong = {name: value for name, value in numbers.items() if value != 0}
        assert not wrong, f"a micro-batch of which no token trains adds {wrong}: each must be 0."

    def test_every_loss_reaches_its_model(self) -> None:
        """Also where nothing is to be learned: a backward pass gathers weights, for which all ranks wait."""
        step = self._step(self._rows())
        kept, nothing = step.batch.tokens, torch.zeros(int(step.batch.num_tokens.sum()), dtype=torch.bool)
        cases = {
            "whose advantages are all 0": (kept.replace(advantages=torch.zeros(len(nothing))), step.trained_leaves),
            "of which no token trains": (
                step.batch.replace(response_mask=nothing).tokens,
                {name: torch.zeros(0) for name in step.leaves},
            ),
        }
        for what, (micro_batch, leaves) in cases.items():
            try:
                cut = unreached(step.algorithm, micro_batch, leaves, step.denominators)
            except Exception:  # noqa: BLE001 - a check of its own
                pytest.skip(NOT_COMPARED)
            assert not cut, (
                f"{cut} of a micro-batch {what} does not depend on the model: return sums over its tokens in any case, "
                "and no constant, for which no backward pass would run on this rank."
            )

    def test_gradients_are_finite_at_extreme_ratios(self) -> None:
        """After a step that was too large, single tokens are far from the old policy, on both sides."""
        step = self._step(self._rows())
        mask = torch.from_numpy(step.batch.per_token["response_mask"])
        is_high = (torch.arange(len(mask)) % 2).bool()
        near, far = (torch.where(mask, logprob, 0.0) for logprob in (-1e-3, -EXTREME))
        current, old = torch.where(is_high, near, far), torch.where(is_high, far, near)
        batch = step.batch.with_tokens(old_logprobs=old)
        if step.algorithm.needs.reference_policy:
            batch = batch.with_tokens(ref_logprobs=current)
        if step.algorithm.needs.rollout_logprobs:
            batch = batch.with_tokens(rollout_logprobs=old)
        leaves = step.leaves | {"logprobs": current}
        learned = self._learned(dataclasses.replace(step, batch=batch, leaves=leaves))
        assert bool(learned.loss.isfinite()), f"the loss is {float(learned.loss)} at ratios of exp(+-{EXTREME:.0f})."
        wrong = [name for name, gradient in learned.gradients.items() if not gradient.isfinite().all()]
        assert not wrong, (
            f"the gradient to {wrong} has NaN or infinities where policy and old policy are {EXTREME:.0f} nats apart: "
            "limit the log ratio before exp(). A clamp after it leaves 0 times infinity in the backward pass."
        )

    def test_better_completions_become_more_likely(self) -> None:
        """One completion of a prompt is right, or one is wrong: the loss raises its probability, or lowers it."""
        if not self.learns_from_rewards:
            pytest.skip("does not apply: learns_from_rewards is False")
        rows = contrasting_rows(0, max(self.run.group_size, 2))
        step = self._step([dataclasses.replace(row, ref_logprobs=row.old_logprobs) for row in rows])
        per_row = torch.from_numpy(step.batch.sums(self._learned(step).gradients["logprobs"].numpy()))
        advice = "Set learns_from_rewards = False where this is meant."
        assert bool((per_row[is_alone(rows, 1.0)] < 0).all()), (
            "the loss does not raise the logprobs of completions that are better than others of their prompt: it is "
            f"minimised, so a policy gradient has the sign -A. {advice}"
        )
        assert float(per_row[is_alone(rows, 0.0)].sum()) > 0, (
            f"the loss does not lower the logprobs of worse ones. {advice}"
        )


def _far_apart(row: Row) -> Row:
    """Return a completion whose logprobs, values and reward are far from usual ones, and from each other."""
    sample = row.sample
    far = {name: FAR * getattr(row, name) for name in ("logprobs", "old_logprobs", "ref_logprobs", "values")}
    far_sample = dataclasses.replace(
        sample, rollout_logprobs=FAR * sample.rollout_logprobs, reward=float(FAR * sample.reward)
    )
    return dataclasses.replace(row, sample=far_sample, **far)
