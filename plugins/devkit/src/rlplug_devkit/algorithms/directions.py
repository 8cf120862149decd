"""Checks of the direction in which an algorithm moves: towards rewards, targets and the reference, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor

from rlplug_devkit.algorithms.checks import SEEDS, AlgorithmChecks
from rlplug_devkit.algorithms.passes import Learned, Step, advantages_of_rows, learn
from rlplug_devkit.algorithms.steps import Row, batch_of, contrasting_rows, is_alone
from rlplug_devkit.claims import DOES_NOT_APPLY

MEANT: Final = "Where this is meant, `excused` says why."
MOVED: Final = 0.3
"""Nats that a policy has moved, more than the limit of a usual clip."""
SMALL: Final = {"logprobs": 1e-4, "rewards": 1e-3}
"""Changes that float32 shows and half precision does not."""
NOT_SMOOTH: Final = 0.2
"""Share of a small change by which two of them may differ, since limits may lie between."""
PER_TOKEN: Final = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


class DirectionChecks(AlgorithmChecks):
    """Checks that hold whatever the equations are; ``excused`` names those that an algorithm breaks on purpose."""

    @pytest.mark.parametrize("name", PER_TOKEN)
    def test_numbers_of_a_token_are_used_at_that_token(self, name: str) -> None:
        """``logprobs``, and all logprobs of a micro-batch, are of the same tokens: nothing is shifted."""
        step = self._step(self._rows())
        needs = step.algorithm.needs
        is_there = {"ref_logprobs": needs.reference_policy, "rollout_logprobs": needs.rollout_logprobs}
        if not is_there.get(name, True):
            pytest.skip(f"{DOES_NOT_APPLY}{name} is not needed")
        before, counts = learn(step, step.all_rows).gradients["logprobs"], step.batch.num_tokens
        mask = torch.from_numpy(step.batch.per_token["response_mask"])
        places, numbers = mask.nonzero().flatten(), torch.from_numpy(step.batch.per_token[name])
        num_changed = num_elsewhere = 0
        for row in (counts > 2).nonzero().flatten().tolist():
            place = places[int(counts[:row].sum()) + 1].reshape(1)
            changed = step.batch.with_tokens(**{name: numbers.clone().index_add(0, place, torch.tensor([-MOVED / 6]))})
            after = learn(dataclasses.replace(step, batch=changed), step.all_rows).gradients["logprobs"]
            is_other = (after - before).abs() > 1e-6 * float(before.abs().max())
            num_changed += bool(is_other.any())
            num_elsewhere += bool(is_other.any()) and not bool(is_other[place])
        assert 2 * num_elsewhere <= num_changed, (
            f"when {name} of a token change, the gradient to logprobs of other tokens of the completion does, and that "
            "of the token itself does not: is it shifted by one?"
        )

    # ---- the reference and entropy ----------------------------------------------------------------------------------

    def test_the_reference_holds_the_policy_back(self) -> None:
        """In the loss, where its gradient leads to the reference, or in the rewards, which distance makes smaller."""
        if not self._ready().needs.reference_policy:
            pytest.skip(f"{DOES_NOT_APPLY}needs.reference_policy is False")
        rows = self._contrast()
        step = self._step(rows)
        mask = torch.from_numpy(step.batch.per_token["response_mask"])
        signs = torch.where(torch.arange(len(mask)) % 2 == 0, 1.0, -1.0)
        ahead = torch.where(mask, MOVED * signs, 0.0)  # of the reference
        at_rest = step.batch.with_advantages(torch.zeros(len(rows)))
        old = torch.from_numpy(step.batch.per_token["old_logprobs"])
        here, there = (
            learn(dataclasses.replace(step, batch=at_rest.with_tokens(ref_logprobs=reference)), step.all_rows)
            for reference in (old, old - ahead)
        )
        pull = float(((there.gradients["logprobs"] - here.gradients["logprobs"]) * ahead).sum())
        assert pull >= 0, (
            "the loss falls as the policy leaves the reference: a penalty is added to a loss that is minimised. "
            f"{MEANT}"
        )
        equal = [row.with_reward(1.0) for row in rows]
        equal[1] = dataclasses.replace(equal[1], ref_logprobs=equal[1].ref_logprobs - _trained(equal[1], MOVED))
        far, *others = _means(equal, self)
        near = sum(others) / len(others)
        assert far <= near + 1e-6, (
            "of completions with equal rewards, one that the policy makes more likely than the reference does has a "
            f"larger advantage: a penalty is subtracted from a reward. {MEANT}"
        )

    def test_a_term_of_the_entropy_raises_it(self) -> None:
        """Whatever the steps before were like, of which its coefficient may come."""
        if not self._ready().needs.entropy_gradient:
            pytest.skip(f"{DOES_NOT_APPLY}needs.entropy_gradient is False")
        for algorithm in self._algorithms():
            step = self._step(self._rows(), algorithm)
            gradient = learn(step, step.all_rows).gradients["entropy"]
            assert float(gradient.sum()) <= 0, (
                f"the loss falls as the entropy does: a bonus is subtracted from a loss that is minimised. {MEANT}"
            )

    # ---- the critic -------------------------------------------------------------------------------------------------

    def test_values_move_towards_their_targets(self) -> None:
        for seed in SEEDS:
            step = self._step(self._rows(seed))
            if not step.algorithm.needs.critic:
                pytest.skip(f"{DOES_NOT_APPLY}needs.critic is False")
            gradient, targets = learn(step, step.all_rows).gradients["values"], step.batch.tokens.returns
            assert targets is not None
            mask = torch.from_numpy(step.batch.per_token["response_mask"])
            is_away = gradient[mask] * (step.leaves["values"][mask] - targets) < 0
            assert not bool(is_away.any()), (
                f"value_loss moves {int(is_away.sum())} of {len(is_away)} values away from their `returns`."
            )

    def test_the_last_target_is_of_the_reward(self) -> None:
        """Nothing follows the last token of a finished completion, so its value is no part of its target."""
        algorithm, rows = self._ready(), self._contrast()
        if not algorithm.needs.critic:
            pytest.skip(f"{DOES_NOT_APPLY}needs.critic is False")
        batch = batch_of(rows, algorithm.needs)
        ends = batch.num_tokens.cumsum(0) - 1
        mask = torch.from_numpy(batch.per_token["response_mask"])
        is_last = torch.zeros(int(mask.sum())).index_fill(0, ends, 1.0)
        shifted = torch.zeros(len(mask)).masked_scatter(mask, is_last)
        values = torch.from_numpy(batch.per_token["values"])
        more = batch_of([row.with_reward(row.sample.reward + 1) for row in rows], algorithm.needs)
        targets = [
            self._ready().advantages(each).returns for each in (batch, batch.with_tokens(values=values + shifted), more)
        ]
        found, moved, rewarded = (each[ends] for each in targets if each is not None)
        assert float((moved - found).abs().max()) < 0.5, (
            "the target of a completion's last token moves with the critic's own value of it: targets are advantages "
            "plus the values that were subtracted, before advantages are normalised."
        )
        assert bool((rewarded > found).all()), "with larger rewards the targets of last tokens are not larger."

    # ---- the old policy ---------------------------------------------------------------------------------------------

    def test_a_move_the_wrong_way_is_undone(self) -> None:
        """Earlier mini-batches of a step may move a completion against its advantage: that is never clipped."""
        if not self.learns_from_rewards:
            pytest.skip(f"{DOES_NOT_APPLY}learns_from_rewards is False")
        rows = [
            dataclasses.replace(row, logprobs=row.logprobs + _trained(row, -MOVED if row.sample.reward > 0 else MOVED))
            for row in self._contrast()
        ]
        rows = [dataclasses.replace(row, ref_logprobs=row.logprobs) for row in rows]
        step = self._step(rows)
        per_row = torch.from_numpy(step.batch.sums(learn(step, step.all_rows).gradients["logprobs"].numpy()))
        advice = (
            "Clipping is the minimum of the plain and the clipped objective, so that only moves which went far enough "
            f"have no gradient. {MEANT}"
        )
        assert bool((per_row[is_alone(rows, 1.0)] < 0).all()), (
            f"better completions that became less likely by {MOVED} nats a token are not made likely again. {advice}"
        )
        assert float(per_row[is_alone(rows, 0.0)].sum()) > 0, (
            f"worse completions that became more likely by {MOVED} nats a token are not made unlikely again. {advice}"
        )

    def test_the_loss_follows_the_advantages(self) -> None:
        """What other plugins change between advantages and loss, such as a filter, must reach the loss."""
        if not self.learns_from_rewards:
            pytest.skip(f"{DOES_NOT_APPLY}learns_from_rewards is False")
        step = self._step(self._rows())
        advantages = step.batch.tokens.advantages
        if advantages is None or not bool(advantages.any()):
            pytest.skip(f"{DOES_NOT_APPLY}all advantages are 0")
        without = step.batch.replace(advantages=None)  # it may have one number a completion
        other = dataclasses.replace(step, batch=without.replace(advantages=2 * advantages))
        once, twice = (learn(each, each.all_rows).gradients["logprobs"] for each in (step, other))
        assert not torch.equal(once, twice), (
            "the loss has the same gradient when all advantages are twice as large: read micro_batch.advantages."
        )

    # ---- precision --------------------------------------------------------------------------------------------------

    def test_small_changes_of_logprobs_are_seen(self) -> None:
        """Of 0.0001 nats: half precision rounds them off."""
        for seed in SEEDS:
            self._assert_smooth_loss(self._step(self._rows(seed)))

    def test_small_changes_of_rewards_are_seen(self) -> None:
        """Of 0.001, less than any two rewards differ by: half precision rounds them off."""
        for seed in SEEDS:
            self._assert_smooth_advantages(self._contrast(seed), seed)

    def _assert_smooth_loss(self, step: Step) -> None:
        gradient, size = learn(step, step.all_rows).gradients["logprobs"], SMALL["logprobs"]
        numbers = step.leaves["logprobs"]

        def learned(factor: int) -> Learned:
            moved = numbers + factor * size * gradient.sign()
            return learn(dataclasses.replace(step, leaves=step.leaves | {"logprobs": moved}), step.all_rows)

        losses = [learned(factor).loss.double() for factor in range(3)]
        bend, scale = float((losses[2] - 2 * losses[1] + losses[0]).abs()), size * float(gradient.abs().sum())
        assert bend <= NOT_SMOOTH * scale, (
            f"when logprobs change by {size} and by twice as much, the loss does not change in proportion: compute in "
            f"float32, as logprobs and advantages come. {MEANT}"
        )

    def _assert_smooth_advantages(self, rows: Sequence[Row], seed: int) -> None:
        random = np.random.default_rng(seed)
        base, direction = random.permutation(np.linspace(-2, 2, len(rows))), random.choice([-1.0, 1.0], len(rows))

        def numbers(factor: int) -> Tensor:
            moved = base + factor * SMALL["rewards"] * direction
            some = [row.with_reward(float(reward)) for row, reward in zip(rows, moved, strict=True)]
            return torch.cat([each.reshape(-1) for each in advantages_of_rows(batch_of(some), self._advantages(some))])

        found = [numbers(factor).double() for factor in range(3)]
        bend, scale = (found[2] - 2 * found[1] + found[0]).abs().max(), (found[1] - found[0]).abs().max()
        assert float(bend) <= NOT_SMOOTH * float(scale), (
            f"when rewards change by {SMALL['rewards']} and by twice as much, advantages do not change in proportion: "
            f"compute in float32, as rewards come. {MEANT}"
        )

    def _contrast(self, seed: int = 0) -> list[Row]:
        """Return rows of :func:`contrasting_rows`; policy, old policy and reference agree."""
        rows = contrasting_rows(seed, max(self.run.group_size, 2))
        rows = [dataclasses.replace(row, ref_logprobs=row.old_logprobs, logprobs=row.old_logprobs) for row in rows]
        return [dataclasses.replace(row, sample=dataclasses.replace(row.sample, finish_reason="stop")) for row in rows]


def _trained(row: Row, number: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.where(row.sample.response_mask, np.float32(number), np.float32(0))


def _means(rows: Sequence[Row], checks: AlgorithmChecks) -> list[float]:
    """Return the mean advantage of the second row, then of the others."""
    per_row = advantages_of_rows(batch_of(rows), checks._advantages(rows))
    means = [float(each.mean()) for each in per_row]
    return [means[1], means[0], *means[2:]]
