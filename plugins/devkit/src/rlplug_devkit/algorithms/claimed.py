"""Checks of what an algorithm says of itself: what it needs is what it reads, and what streams may stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from rlplug.errors import ConfigError, describe
from rlplug.interfaces.algorithm import Algorithm, Denominators, Needs
from rlplug.types import groups_of
from rlplug_devkit.algorithms.checks import SEEDS, AlgorithmChecks
from rlplug_devkit.algorithms.passes import Learned, Step, advantages_of_rows, difference, is_close, learn, step_of
from rlplug_devkit.algorithms.steps import NUM_GROUPS, Row, batch_of, make_rows
from rlplug_devkit.algorithms.training import numbers_of, tensors_otherwise, train
from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.tasks.calls import NOT_COMPARED

NEEDS: Final = [field.name for field in dataclasses.fields(Needs)]
READ_BY_NAME: Final[Mapping[str, Sequence[str]]] = {
    "reference_policy": ("ref_logprobs",),
    "rollout_logprobs": ("rollout_logprobs",),
    "critic": ("values",),
}
"""Fields of a batch that come of each need, besides ``old_logprobs``."""
SHIFT: Final = 0.3
"""What is added to a field of a batch, to see who reads it."""


class ClaimChecks(AlgorithmChecks):
    """Checks of ``needs``, ``streamed_divisor``, and what a loss has a gradient to."""

    def _all_of(self, algorithm: Algorithm, rows: Sequence[Row], **changes: Tensor) -> tuple[Step, dict[str, Any]]:
        """Return a step, and all that the algorithm says of it, with fields [N] of its batch replaced."""
        try:
            batch = batch_of(rows, algorithm.needs).with_tokens(**changes)
            result = algorithm.advantages(batch)
            step = step_of(algorithm, rows, result)
            step = dataclasses.replace(step, batch=step.batch.with_tokens(**changes))
            learned = learn(step, step.all_rows)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)
        return step, {**numbers_of(result, step.batch), "learned": learned}

    # ---- needs -----------------------------------------------------------------------------------------------------

    def test_needs_stay_the_same(self) -> None:
        """The loop reads them when it loads models, and again later."""
        algorithm = self.make_algorithm()
        before = algorithm.needs
        assert isinstance(before, Needs), f"needs is a {type(before).__name__}: return Needs(...)."
        algorithm.setup(self.run)
        try:
            train(algorithm, self.run, 0, 2)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)
        assert algorithm.needs == before, (
            f"needs is {before} before the run and {algorithm.needs} after two steps: models are loaded once."
        )

    def test_what_losses_read_is_declared(self) -> None:
        algorithm, rows = self._ready(), self._rows()
        step = self._step(rows, algorithm)
        result = self._advantages(rows)
        everything = dataclasses.replace(step, batch=step_of(self._ready(), rows, result, declared=False).batch)
        if not algorithm.needs.critic:  # no critic's targets without one
            everything = dataclasses.replace(everything, batch=everything.batch.replace(returns=None))
        found = difference(learn(everything, step.all_rows), learn(step, step.all_rows), self.tolerance)
        assert not found, (
            f"with what `needs` does not declare, {found}: a run computes nothing else, so a term that reads it would "
            "be missing there, and nobody told."
        )

    def test_an_entropy_term_is_declared(self) -> None:
        """Without ``needs.entropy_gradient`` entropy comes without a gradient: a term of it changes nothing."""
        step = self._step(self._rows())
        if step.algorithm.needs.entropy_gradient:
            pytest.skip(f"{DOES_NOT_APPLY}needs.entropy_gradient is True")
        logprobs, entropy, _ = (leaf.requires_grad_() for leaf in step.trained_leaves.values())
        loss = step.algorithm.loss(step.batch.tokens, logprobs, entropy, step.denominators).loss
        (gradient,) = torch.autograd.grad(loss, [entropy], allow_unused=True)
        assert gradient is None or not bool(gradient.any()), (
            "the loss has a term of the entropy, which has no gradient in a run: declare needs.entropy_gradient."
        )

    @pytest.mark.parametrize("need", NEEDS)
    def test_what_is_needed_is_used(self, need: str) -> None:
        """A reference policy and a critic take memory and time, and a need of groups refuses runs."""
        if not getattr(self._ready().needs, need):
            pytest.skip(f"{DOES_NOT_APPLY}needs.{need} is False")
        assert any(self._uses(need, *pair) for pair in zip(self._algorithms(), self._algorithms(), strict=True)), (
            f"needs.{need} is True, and nothing depends on it: neither advantages, nor losses, nor metrics. Leave it "
            "out: a run prepares what is needed, at a cost, and refuses what it cannot prepare."
        )

    def _uses(self, need: str, algorithm: Algorithm, other: Algorithm) -> bool:
        """Return whether what an algorithm says of a step depends on a need; another one is in the same state."""
        rows = self._rows()
        step, before = self._all_of(algorithm, rows)
        if need == "entropy_gradient":
            return bool(before["learned"].gradients["entropy"].any())
        if need == "groups":
            return self._selects(algorithm) or _differ(before, self._all_of(other, _ungrouped(rows))[1])
        names = READ_BY_NAME.get(need, (need,))
        mask = torch.from_numpy(step.batch.per_token["response_mask"])
        changes = {name: torch.where(mask, torch.from_numpy(step.batch.per_token[name]) - SHIFT, 0.0) for name in names}
        if need == "old_logprobs":  # every loss has them: the need is about advantages
            batch = batch_of(rows, algorithm.needs)
            pairs = ((algorithm, batch), (other, batch.with_tokens(**changes)))
            return _differ(*(numbers_of(each.advantages(some), some) for each, some in pairs))
        return _differ(before, self._all_of(other, rows, **changes)[1])

    def _selects(self, algorithm: Algorithm) -> bool:
        """Return whether it leaves out samples of some group."""
        steps = [groups_of([row.sample for row in self._rows(seed)]) for seed in SEEDS]
        return any(len(list(algorithm.select(group))) < len(group) for groups in steps for group in groups)

    def test_comparing_completions_is_declared(self) -> None:
        """A run without ``needs.groups`` may have a single completion for each prompt."""
        run = dataclasses.replace(self.run, group_size=1, num_completions=NUM_GROUPS)
        if self.make_algorithm().needs.groups or not self.learns_from_rewards:
            pytest.skip(f"{DOES_NOT_APPLY}needs.groups is True, or learns_from_rewards is False")
        algorithm = self._ready_for(run)
        if algorithm is None:
            pytest.skip(f"{DOES_NOT_APPLY}setup refuses a group_size of 1")
        rows = [row for seed in SEEDS for row in make_rows(seed, 1, run.max_new_tokens)]
        rows = [_in_group(row, index) for index, row in enumerate(rows)]
        result = self._advantages(rows, algorithm)
        numbers = torch.cat(advantages_of_rows(batch_of(rows), result)) if result.of_tokens is not None else None
        assert bool((result.of_sequences if numbers is None else numbers).any()), (  # type: ignore[union-attr]
            "with one completion for each prompt all advantages are 0: declare needs.groups, which refuses such a run."
        )

    # ---- gradients -------------------------------------------------------------------------------------------------

    def test_every_token_learns(self) -> None:
        """When policy and old policy are the same, as at the start of each update; of critics too."""
        if not self.trains_every_token:
            pytest.skip(f"{DOES_NOT_APPLY}trains_every_token is False")
        step = self._step(_on_policy(self._rows()))
        learned, batch = learn(step, step.all_rows), step.batch
        mask = torch.from_numpy(batch.per_token["response_mask"])
        assert batch.tokens.advantages is not None
        is_silent = (learned.gradients["logprobs"][mask] == 0) & (batch.tokens.advantages != 0)
        assert not bool(is_silent.any()), (
            f"{int(is_silent.sum())} of {len(is_silent)} trainable tokens have an advantage and no gradient, though "
            "the policy is the old one: no token may be left out silently. Return Advantages(..., trains=...), or set "
            "trains_every_token = False."
        )
        if step.algorithm.needs.critic:
            is_silent = (learned.gradients["values"][mask] == 0) & (step.leaves["values"][mask] != batch.tokens.returns)
            share = float(is_silent.float().mean()) if len(is_silent) else 0.0
            assert share < 0.5, f"value_loss has no gradient to {share:.0%} of the values: the critic does not learn."

    def test_the_reference_term_has_a_gradient(self) -> None:
        """Where no advantage moves the policy, a term that changes the loss must move it."""
        algorithm, rows = self._ready(), self._rows()
        if not algorithm.needs.reference_policy:
            pytest.skip(f"{DOES_NOT_APPLY}needs.reference_policy is False")
        step, _ = self._all_of(algorithm, rows)
        tokens = step.batch.with_advantages(torch.zeros(step.batch.num_sequences))
        moved = tokens.with_tokens(ref_logprobs=torch.from_numpy(tokens.per_token["ref_logprobs"]) - SHIFT)
        here, there = (learn(dataclasses.replace(step, batch=batch), step.all_rows) for batch in (tokens, moved))
        if is_close(here.loss, there.loss, self.tolerance):
            pytest.skip(f"{DOES_NOT_APPLY}the loss has no term of the reference policy")
        assert bool(here.gradients["logprobs"].any()), (
            "the loss has a term of the reference policy that has no gradient to logprobs: it would be reported, and "
            "hold nothing back. Compute it with the logprobs that have a gradient."
        )

    # ---- streamed steps --------------------------------------------------------------------------------------------

    def _streamed(self) -> tuple[Algorithm, str]:
        algorithm = self._ready()
        divisor = algorithm.streamed_divisor
        if divisor is None:
            pytest.skip(f"{DOES_NOT_APPLY}streamed_divisor is None")
        return algorithm, str(divisor)

    def test_groups_of_a_streamed_step_stand_alone(self) -> None:
        algorithm, divisor = self._streamed()
        assert divisor in ("num_tokens", "num_sequences"), (
            f"streamed_divisor is {divisor!r}: return 'num_tokens', 'num_sequences' or None."
        )
        assert not algorithm.needs.critic, "streamed_divisor is given and needs.critic is True: a critic cannot stream."
        rows = self._rows()
        whole = self._advantages(rows)
        for group in range(NUM_GROUPS):
            indices = [index for index, row in enumerate(rows) if row.sample.group == group]
            mine = [rows[index] for index in indices]
            alone = self._advantages(mine)
            found = tensors_otherwise(alone, whole, batch_of(mine), batch_of(rows), indices, self.tolerance)
            assert not found, (
                f"streamed_divisor is given, and in a group alone {found}: advantages must depend on no other group."
            )

    def test_streamed_losses_have_one_divisor(self) -> None:
        """Terms are proportional to ``1 / denominators.<divisor>``, and metrics are means over tokens."""
        _, divisor = self._streamed()
        step = self._step(self._rows())
        counts = step.denominators
        other = {"num_tokens": "num_sequences", "num_sequences": "num_tokens"}[divisor]
        once, without = (
            learn(step, step.all_rows, Denominators(**{divisor: getattr(counts, divisor), other: number}))
            for number in (getattr(counts, other), 7 * getattr(counts, other))
        )
        assert is_close(once.loss, without.loss, self.tolerance), (
            f"streamed_divisor is {divisor!r}, and the loss depends on {other} too."
        )
        doubled = learn(step, step.all_rows, Denominators(2 * counts.num_tokens, counts.num_sequences))
        wrong = [
            name
            for name, value in once.metrics.items()
            if not is_close(torch.tensor(2 * doubled.metrics[name]), torch.tensor(value), self.tolerance)
        ]
        assert not wrong, f"streamed_divisor is given, and metrics are not divided by num_tokens: {wrong}."

    # ---- runs ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "changes",
        [{"group_size": 1}, {"group_size": 2}, {"group_size": 17}, {"max_new_tokens": 1}, {"fp8_rollout": True}],
        ids=lambda changes: ", ".join(f"{name} {value}" for name, value in changes.items()),
    )
    def test_a_run_is_refused_or_served(self, changes: dict[str, Any]) -> None:
        """``setup`` raises a ConfigError for a run that is not possible; else everything is finite."""
        run = dataclasses.replace(self.run, **changes, seed=2**62)
        run = dataclasses.replace(run, num_completions=NUM_GROUPS * run.group_size)
        algorithm = self._ready_for(run)
        if algorithm is None or (algorithm.needs.groups and run.group_size < 2):
            pytest.skip(f"{DOES_NOT_APPLY}the algorithm refuses such a run")
        try:
            learned = [each for _, each in train(algorithm, run, 0, 2)]
        except ConfigError as error:
            pytest.fail(f"a step refuses a run that setup accepted: {describe(error)}", pytrace=False)
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"setup accepts {run}, and a step raised {describe(error)}.", pytrace=False)
        assert all(_is_finite(each) for each in learned), f"a loss or gradient of {run} has NaN or infinities."


def _is_finite(learned: Learned) -> bool:
    return bool(learned.loss.isfinite()) and all(bool(each.isfinite().all()) for each in learned.gradients.values())


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether an algorithm says something else: by more than round-off, if by little."""
    for name, value in before.items():
        other = after.get(name)
        if isinstance(value, Learned):
            assert isinstance(other, Learned)
            if difference(other, value, 1e-6):
                return True
        elif isinstance(value, Tensor):
            if not isinstance(other, Tensor) or not is_close(other, value, 1e-6):
                return True
        elif value != other:
            return True
    return False


def _in_group(row: Row, group: int) -> Row:
    return dataclasses.replace(row, sample=dataclasses.replace(row.sample, group=group))


def _ungrouped(rows: Sequence[Row]) -> list[Row]:
    """Return the same rows, each of a prompt of its own."""
    return [_in_group(row, index) for index, row in enumerate(rows)]


def _on_policy(rows: Sequence[Row]) -> list[Row]:
    """Return rows whose policy, old policy, reference and engine agree."""

    def agreed(row: Row) -> Row:
        sample = dataclasses.replace(row.sample, rollout_logprobs=row.old_logprobs)
        return dataclasses.replace(row, sample=sample, logprobs=row.old_logprobs, ref_logprobs=row.old_logprobs)

    return [agreed(row) for row in rows]
