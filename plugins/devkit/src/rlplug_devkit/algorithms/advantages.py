"""Checks of an algorithm's selection and advantages."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from rlplug.errors import describe
from rlplug.interfaces.algorithm import Advantages, Algorithm
from rlplug.interfaces.plain_values import as_number
from rlplug.timeouts import CallError
from rlplug.types import RewardError, Sample, groups_of
from rlplug_devkit.algorithms.checks import SEEDS, AlgorithmChecks
from rlplug_devkit.algorithms.passes import advantages_of_rows, is_close, joined, step_of
from rlplug_devkit.algorithms.steps import NUM_GROUPS, batch_of, make_rows, uneven
from rlplug_devkit.algorithms.training import weighed_otherwise
from rlplug_devkit.tasks.calls import NOT_COMPARED
from rlplug_devkit.tasks.scoring import with_failed

ALL_FAILED = "a step in which every reward failed"


class AdvantageChecks(AlgorithmChecks):
    """Checks of ``select`` and ``advantages``."""

    def _with_everything(self, algorithm: Algorithm) -> Advantages:
        """Return advantages of a batch that has every input, declared or not; skip the check where that fails."""
        try:
            return algorithm.advantages(batch_of(self._rows()))
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)

    def _numbers(self, result: Advantages) -> torch.Tensor:
        """Return the advantages, [B] or [K]; skip the check where there are none."""
        found = result.of_tokens if result.of_sequences is None else result.of_sequences
        return pytest.skip(NOT_COMPARED) if found is None else found

    def test_advantages_can_be_computed(self) -> None:
        """With every input there, declared or not."""
        try:
            algorithm = self._ready()
            step_of(algorithm, self._rows(), algorithm.advantages(batch_of(self._rows())), declared=False)
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"setup or advantages raised {describe(error)}, or returned what cannot train.", pytrace=False)

    def test_advantages_are_well_formed(self) -> None:
        algorithm, batch = self._ready(), batch_of(self._rows())
        result, num_tokens = self._with_everything(algorithm), int(batch.num_tokens.sum())
        assert (result.of_sequences is None) != (result.of_tokens is None), (
            "advantages are of_sequences, one number a completion, or of_tokens, one a trainable token: return one."
        )
        sizes = {
            "of_sequences": batch.num_sequences,
            "of_tokens": num_tokens,
            "returns": num_tokens,
            "trains": num_tokens,
        }
        for name, size in sizes.items():
            tensor = getattr(result, name)
            if tensor is None:
                continue
            dtype = torch.bool if name == "trains" else torch.float32
            found = f"{list(tensor.shape)}, {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor)
            assert isinstance(tensor, torch.Tensor), f"{name} is a {found}: return a tensor."
            assert list(tensor.shape) == [size], f"{name} is {found}: its shape must be [{size}]."
            assert tensor.dtype == dtype, f"{name} is {found}: it must be {dtype}."
            assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), f"{name} has NaN or infinities."
        if algorithm.needs.critic:
            assert result.returns is not None, "needs.critic is true, and advantages return no targets as `returns`."
        for metric, value in result.metrics.items():
            assert isinstance(metric, str), f"a metric's name is {metric!r}: give text."
            try:
                as_number(value)
            except CallError as problem:
                pytest.fail(f"the metric {metric} is {problem}.", pytrace=False)

    def test_advantages_repeat(self) -> None:
        first, second = (self._numbers(self._with_everything(self._ready())) for _ in range(2))
        assert torch.equal(first, second), (
            "a second object computes other advantages of the same step: a resumed run would differ. Seed what is "
            "random with the run's seed, which setup gets."
        )

    def test_what_advantages_read_is_declared(self) -> None:
        algorithm = self._ready()
        everything = self._with_everything(algorithm)
        try:
            declared = self._ready().advantages(batch_of(self._rows(), algorithm.needs))
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"without what `needs` does not declare, advantages raised {describe(error)}.", pytrace=False)
        assert is_close(self._numbers(declared), self._numbers(everything), self.tolerance), (
            f"advantages read what `needs` does not declare: with {algorithm.needs} alone they differ. A run computes "
            "nothing else."
        )

    def test_selected_samples_are_the_groups(self) -> None:
        """``select`` returns samples of the group that it got, each once, and the same whatever it was called for."""
        groups = groups_of([row.sample for row in self._rows()])
        algorithm = self._ready()
        chosen = []
        for group in groups:
            kept = list(algorithm.select(group))
            alien = [s for s in kept if not any(s is other for other in group)]
            assert not alien, "select returned a sample that is not of its group: return those objects that train."
            assert len({id(sample) for sample in kept}) == len(kept), "select returned a sample twice."
            chosen.append([id(sample) for sample in kept])
        backwards = self._ready()
        again = [[id(sample) for sample in backwards.select(group)] for group in groups[::-1]][::-1]
        assert again == chosen, (
            "select chooses others when groups come in another order: which rank has a group, and when, is not fixed. "
            "Seed what is random by the run's seed, the step and group[0].group."
        )
        refills = algorithm.max_refills
        assert type(refills) is int and refills >= 0, f"max_refills is {refills!r}: return 0 or more, an integer."  # noqa: PT018
        assert 1 <= algorithm.over_sampling < math.inf, f"over_sampling is {algorithm.over_sampling}: return 1 or more."

    def test_selection_knows_no_other_group(self) -> None:
        """Another rank may have had a group, or a later step may bring the same completions again."""
        groups = groups_of([row.sample for row in self._rows()])
        algorithm = self._ready()
        for group, other in zip(groups, (*groups[1:], groups[0]), strict=True):
            expected = [id(sample) for sample in self._ready().select(group)]
            like = [*group[: len(group) // 2], *other[len(group) // 2 :]]
            algorithm.select([dataclasses.replace(sample, group=len(groups) + group[0].group) for sample in like])
            found = [id(sample) for sample in algorithm.select(group)]
            assert found == expected, (
                f"select chooses {len(found)} of a group where some of its completions were in an earlier group, and "
                f"{len(expected)} of it alone: keep nothing of a call; another rank may have the other group."
            )

    def test_the_step_is_left_as_it_was(self) -> None:
        """Rewards and logprobs are read again after the advantages, by metrics and by hooks of other plugins."""
        algorithm, rows = self._ready(), self._rows()
        batch = batch_of(rows, algorithm.needs)
        kept = copy.deepcopy({**batch.per_sequence, **batch.per_token})
        try:
            algorithm.advantages(batch)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)
        now = {**batch.per_sequence, **batch.per_token}
        changed = [name for name in kept if kept[name].tobytes() != now[name].tobytes()]  # NaN equals NaN
        assert not changed, f"advantages wrote into {changed} of the batch: copy a tensor before changing it."

    def test_failed_rewards_do_not_count(self) -> None:
        """A failed reward is 0 in the batch, which is a number like others: only ``reward_valid`` tells."""
        rows = self._rows()
        algorithm = self._ready()
        batch = batch_of(rows, algorithm.needs)
        result = self._advantages(rows, algorithm)
        changed = batch.replace(rewards=torch.where(batch.reward_valid, batch.rewards, 50.0))
        moved = self._ready().advantages(changed)
        advice = "Leave rows out where batch.reward_valid is false, of means and deviations too."
        assert is_close(self._numbers(moved), self._numbers(result), self.tolerance), (
            f"advantages depend on rewards that failed. {advice}"
        )
        per_row = zip(advantages_of_rows(batch, result), batch.reward_valid.tolist(), strict=True)
        assert not any(bool(row.any()) for row, is_valid in per_row if not is_valid), (
            f"completions whose reward failed have advantages. {advice}"
        )
        for group in groups_of([row.sample for row in rows]):
            alike = [dataclasses.replace(each, reward=0.5, rewards={"made": 0.5}) for each in group]
            alike[0] = dataclasses.replace(alike[0], rewards={"made": RewardError("it failed")})
            for some in (list(group), alike):
                kept, others = (_places(self._ready().select(each), each) for each in (some, with_failed(some, 50.0)))
                assert kept == others, (
                    f"select chooses {len(kept)} of a group, and {len(others)} where another number stands for a "
                    "reward that failed: what reward and trained_reward say of a sample with errors means nothing."
                )

    def test_the_order_within_a_group_does_not_matter(self) -> None:
        steps = [self._rows(seed) for seed in SEEDS]
        for rows in (*steps, *map(uneven, steps)):
            order = sorted(range(len(rows)), key=lambda row: (rows[row].sample.group, -row))
            moved = [rows[row] for row in order]
            before, after = (advantages_of_rows(batch_of(some), self._advantages(some)) for some in (rows, moved))
            assert is_close(joined(after), joined([before[row] for row in order]), self.tolerance), (
                "a completion's advantage depends on its place among the completions of its prompt."
            )

    def test_a_rank_without_completions_is_served(self) -> None:
        algorithm = self._ready()
        try:
            result = algorithm.advantages(batch_of([], algorithm.needs))
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"advantages raised {describe(error)} for a rank that has no completions.", pytrace=False)
        assert len(self._numbers(result)) == 0, "a rank without completions got advantages."

    def test_a_step_without_rewards_is_finite(self) -> None:
        algorithm, rows = self._ready(), self._rows()
        batch = batch_of(rows, algorithm.needs)
        nothing = batch.replace(
            rewards=torch.zeros(len(rows)),
            reward_valid=torch.zeros(len(rows), dtype=torch.bool),
            response_mask=torch.zeros(int(batch.num_tokens.sum()), dtype=torch.bool),
        )
        try:
            result = algorithm.advantages(nothing)
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"advantages raised {describe(error)} in {ALL_FAILED}.", pytrace=False)
        numbers = [float(value) for value in result.metrics.values()]
        assert bool(self._numbers(result).isfinite().all()) and all(map(math.isfinite, numbers)), (  # noqa: PT018
            f"advantages or metrics have NaN or infinities in {ALL_FAILED}: a mean of nothing needs a case of its own."
        )

    @pytest.mark.parametrize("size", [2, 4])
    def test_ranks_get_what_one_rank_gets(self, size: int) -> None:
        """Ranks have whole groups each, and the last one none."""
        for seed in SEEDS:
            rows = self._rows(seed)
            whole, place = self._advantages(rows), {id(row): index for index, row in enumerate(rows)}
            for mine, part in self._on_ranks(rows, size):
                indices = [place[id(row)] for row in mine]
                problem = weighed_otherwise(part, whole, batch_of(mine), batch_of(rows), indices, self.tolerance)
                assert not problem, (
                    f"on {size} ranks {problem}: a rank has a part of the step. Numbers over the whole step come from "
                    "batch.step: mean, sum and moments."
                )

    def test_equal_rewards_have_no_advantage(self) -> None:
        if self.zero_advantages == "never":
            pytest.skip("does not apply: zero_advantages is 'never'")
        per_group = 0.1 if self.zero_advantages == "group" else 0.0
        for seed, size in enumerate(dict.fromkeys((self.run.group_size, 7, 3, 6))):
            run = dataclasses.replace(self.run, group_size=size, num_completions=NUM_GROUPS * size)
            rows = make_rows(seed, size, run.max_new_tokens)
            rows = [row.with_reward(0.3 + per_group * row.sample.group) for row in rows]
            algorithm = self._ready_for(run)
            if algorithm is None:  # it refuses groups of this size
                continue
            largest = float(self._numbers(self._advantages(rows, algorithm)).abs().max())
            assert largest <= 1e-6, (
                f"completions of a {self.zero_advantages} with equal rewards have advantages of up to {largest:.3g}: "
                "round-off over a small deviation trains on noise. Return 0 there, or set zero_advantages."
            )


def _places(chosen: Sequence[Sample], group: Sequence[Sample]) -> list[int]:
    """Return where the chosen samples are in their group, by ascending place."""
    kept = {id(sample) for sample in chosen}
    return [place for place, sample in enumerate(group) if id(sample) in kept]
