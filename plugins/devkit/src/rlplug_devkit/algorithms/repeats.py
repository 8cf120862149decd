"""Checks that the same completions give the same result: again, elsewhere, beside other calls, in any size."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import pickle
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch

from rlplug.errors import describe
from rlplug.interfaces.algorithm import Advantages, Algorithm, RunInfo
from rlplug.types import Batch, Sample, StepBatch, groups_of
from rlplug_devkit.algorithms.checks import AlgorithmChecks, larger
from rlplug_devkit.algorithms.passes import Learned, Step, is_close, joined, learn, learn_micro_batch, step_of
from rlplug_devkit.algorithms.steps import Row, batch_of, make_row
from rlplug_devkit.algorithms.training import tensors_otherwise, train, trained_otherwise
from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.other_process import Unavailable, call_elsewhere
from rlplug_devkit.process_state import new_objects_alone, num_alive, num_held

LONG: Final = 10_000
"""Tokens of a long completion."""
LARGE: Final = 1e8
"""A large reward, whose square is finite in float32."""
KINDS: Final = (torch.Tensor, Batch, StepBatch, Sample)
NUM_ROUNDS: Final = 8
NUM_SMALL_STEPS: Final = 64
"""Steps of which each may keep something, more than a window of some steps has."""


class RepeatChecks(AlgorithmChecks):
    """Checks of an algorithm with itself: on other calls, other processes, and steps of other sizes."""

    # ---- again ------------------------------------------------------------------------------------------------------

    def test_a_second_call_gives_the_same(self) -> None:
        """A step has several epochs, and wrappers of other plugins may call again."""
        algorithm, rows = self._ready(), self._rows()
        batch = batch_of(rows, algorithm.needs)
        first = self._advantages(rows, algorithm)
        step = self._step(rows, algorithm)
        learned = [learn(step, step.all_rows) for _ in range(2)]
        again = algorithm.advantages(batch)
        found = tensors_otherwise(again, first, batch, batch, step.all_rows, 0.0)
        assert not found, f"in a second call of advantages with the same batch, {found}: let after_step change state."
        found = trained_otherwise([([], learned[1])], [([], learned[0])], 0.0)
        assert not found, f"in a second call of the losses with the same micro-batch, {found}: keep nothing of a call."

    def test_steps_repeat_in_another_process(self) -> None:
        """With another seed of hashes, rank, working folder, time zone and locale, behind another run."""
        runs = [run for run in (larger(self.run), self.run) if self._ready_for(run) is not None]
        expected = [step for run in runs for step in train(self._made_for(run), run, 0, 2)]
        subject: Any = self.make_algorithm()
        try:
            pickle.dumps(subject)
        except Exception:  # noqa: BLE001 - then the test class makes it there
            subject = type(self)
        try:
            found = call_elsewhere(_train_there, subject, runs, timeout_s=20 * self.deadline_s)
        except Unavailable as error:
            pytest.skip(f"{DOES_NOT_APPLY}another process cannot import it ({error})")
        except RuntimeError as error:
            pytest.fail(f"two steps in another process: {error}", pytrace=False)
        differs = trained_otherwise(found, expected, self.tolerance)
        assert not differs, (
            f"in another process {differs}: nothing may depend on hash(), the order of a set, the rank, the time, the "
            "host, an environment variable, or the runs that the process had before: keep what setup gets in self."
        )

    def test_a_pickled_algorithm_goes_on_alike(self) -> None:
        algorithm = self._ready()
        train(algorithm, self.run, 0, 2)
        try:
            again = pickle.loads(pickle.dumps(algorithm))
        except Exception as error:  # noqa: BLE001 - whatever it raises, it says that it cannot
            pytest.skip(f"{DOES_NOT_APPLY}the algorithm cannot be pickled ({type(error).__name__})")
        found, expected = (train(each, self.run, 2, 3) for each in (again, algorithm))
        differs = trained_otherwise(found, expected, 0.0)
        assert not differs, f"after a pickle {differs}: keep in attributes of the object what its methods read."

    def test_what_it_gets_is_not_kept(self) -> None:
        """The run writes into tensors and lists of a step when it is over."""
        expected = train(self._ready(), self.run, 0, 3)
        try:
            found = train(self._ready(), self.run, 0, 3, spoils=True)
        except Exception as error:  # noqa: BLE001 - of a thing that was cleared
            pytest.fail(f"when what a step got is overwritten, a later step raised {describe(error)}.", pytrace=False)
        differs = trained_otherwise(found, expected, 0.0)
        assert not differs, f"when what a step got is overwritten after it, {differs}: copy what is kept."

    def test_selection_leaves_samples_alone(self) -> None:
        """A sample is logged after it was selected; another rank has a copy of it."""
        algorithm, rows = self._ready(), self._rows()
        for group in groups_of([row.sample for row in rows]):
            before = copy.deepcopy(list(group))
            given = list(group)
            chosen = [_place(sample, group) for sample in algorithm.select(given)]
            assert [id(sample) for sample in given] == [id(sample) for sample in group], "select changed its list."
            changed = [index for index, sample in enumerate(group) if _parts(sample) != _parts(before[index])]
            assert not changed, f"select wrote into the samples {changed} of its group: copy before changing."
            others = algorithm.select(tuple(before))
            again = [_place(sample, before) for sample in others]
            assert again == chosen, "select chooses others of a copy of its group: decide by values, not by objects."

    def test_losses_leave_their_inputs(self) -> None:
        step = self._step(self._rows())
        leaves = {name: leaf.clone() for name, leaf in step.trained_leaves.items()}
        tracked = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        entropy = tracked["entropy"] if step.algorithm.needs.entropy_gradient else tracked["entropy"].detach()
        step.algorithm.loss(step.batch.tokens, tracked["logprobs"], entropy, step.denominators)
        if step.algorithm.needs.critic:
            step.algorithm.value_loss(step.batch.tokens, tracked["values"], step.denominators)
        changed = [name for name, leaf in leaves.items() if not leaf.equal(tracked[name].detach())]
        assert not changed, f"a loss wrote into {changed}, which other plugins' wrappers read: copy first."

    # ---- of other sizes ---------------------------------------------------------------------------------------------

    def _sized(self, rows: Sequence[Row], run: RunInfo | None = None) -> tuple[Advantages, Learned]:
        """Return what is made of rows; fail where that raises, or has NaN or infinities."""
        algorithm = self._ready() if run is None else self._ready_for(run)
        if algorithm is None:
            pytest.skip(f"{DOES_NOT_APPLY}setup refuses {run}")
        try:
            result = algorithm.advantages(batch_of(rows, algorithm.needs))
            step = step_of(algorithm, rows, result)
            learned = learn(step, step.all_rows)
        except Exception as error:  # noqa: BLE001 - the algorithm's own
            pytest.fail(f"advantages or a loss raised {describe(error)}.", pytrace=False)
        tensors = {"advantages": joined([*_given(result)]), "the loss": learned.loss, **learned.gradients}
        wrong = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
        wrong += [name for name, value in (result.metrics | learned.metrics).items() if not math.isfinite(value)]
        assert not wrong, f"{wrong} have NaN or infinities."
        return result, learned

    def test_long_completions_are_served(self) -> None:
        """Ten thousand tokens, beside short ones."""
        random = np.random.default_rng(0)
        sizes = [LONG, *range(1, max(self.run.group_size, 2))]
        rows = [make_row(random, 0, size, float(size % 2)) for size in sizes]
        began = time.monotonic()
        run = dataclasses.replace(self.run, max_new_tokens=LONG)
        self._sized(rows, run)
        seconds = time.monotonic() - began
        assert seconds < self.deadline_s, f"a completion of {LONG} tokens took {seconds:.0f} s: is it quadratic?"

    def test_a_single_completion_is_served(self) -> None:
        """A selection, a fault of an engine or a small last batch may leave one."""
        for index in (0, self.run.group_size):
            self._sized([self._rows()[index]])

    def test_large_rewards_stay_finite(self) -> None:
        """A reward without a bound, such as a length or a price."""
        rows = [
            row.with_reward((-LARGE if index % 3 else LARGE) * (1 + row.sample.reward))
            for index, row in enumerate(self._rows())
        ]
        self._sized(rows)
        for large, apart in ((LARGE, 1.0), (LARGE, 8.0), (LARGE / 1e4, 2.0**-9)):  # 8 and 2**-9: float32's steps there
            rows = [row.with_reward(large + apart * (index % 3)) for index, row in enumerate(self._rows())]
            self._sized(rows)

    def test_numbers_of_groups_do_not_matter(self) -> None:
        """A rank has some of the step's groups, and a step refilled goes on to count."""
        rows = self._rows()
        moved = [_in_group(row, 7 + 1000 * row.sample.group) for row in rows]
        expected, _ = self._sized(rows)
        found, _ = self._sized(moved)
        batch = batch_of(rows)
        differs = tensors_otherwise(found, expected, batch, batch, list(range(len(rows))), self.tolerance)
        assert not differs, (
            f"with other numbers of the same groups, {differs}: a group is those rows whose group_index is equal, and "
            "the number itself is no index."
        )

    def test_other_rows_of_tokens_follow_their_rows(self) -> None:
        """``per_token`` has a number of each trainable token, in their order."""
        step = self._step(self._rows())
        whole = _per_token(step, step.all_rows)
        counts = step.batch.num_tokens
        for name, tensor in whole.items():
            assert isinstance(tensor, torch.Tensor), f"per_token[{name!r}] is a {type(tensor).__name__}: give a tensor."
            shape = list(tensor.shape)
            assert shape == [int(counts.sum())], f"per_token[{name!r}] is {shape}: give a number of each token, [K]."
            assert tensor.dtype == torch.bool or tensor.is_floating_point(), f"per_token[{name!r}] is {tensor.dtype}."
            assert not tensor.requires_grad, f"per_token[{name!r}] has a gradient: detach() it, or it keeps memory."
        backwards = step.all_rows[::-1]
        for name, tensor in _per_token(step, backwards).items():
            expected = torch.split(whole[name], counts.tolist())
            assert is_close(tensor.float(), joined([expected[row] for row in backwards]), self.tolerance), (
                f"per_token[{name!r}] is another when the rows come in another order: it must be in that of tokens."
            )

    def test_metrics_have_the_same_names_everywhere(self) -> None:
        """In each micro-batch and step; a run refuses others."""
        names: dict[str, set[str]] = {}
        for seed in range(2):
            step = self._step(self._rows(seed))
            filler = step.batch.select([0]).replace(
                response_mask=torch.zeros(int(step.batch.select([0]).num_tokens.sum()), dtype=torch.bool)
            )
            parts = {f"step {seed}, row {row}": learn(step, [row]) for row in step.all_rows}
            none = {name: torch.zeros(0) for name in step.leaves}
            parts["a micro-batch of no tokens"] = learn_micro_batch(
                step.algorithm, filler.tokens, none, step.denominators
            )
            for what, learned in parts.items():
                names[what] = {*learned.metrics, *learned.maxima, *learned.minima}
        first, *others = names
        wrong = [what for what in others if names[what] != names[first]]
        assert not wrong, (
            f"metrics of {wrong[0]} are {sorted(names[wrong[0]])}, and of {first} {sorted(names[first])}: the same "
            "names always, 0 where there is nothing."
        )

    # ---- what stays -------------------------------------------------------------------------------------------------

    def test_steps_leave_nothing_behind(self) -> None:
        """Neither threads, processes and open files, nor batches, nor the graphs of losses."""
        algorithm = self._ready()
        train(algorithm, self.run, 0, 2)
        with new_objects_alone():
            self._require_nothing_left_of_steps(algorithm)

    def _require_nothing_left_of_steps(self, algorithm: Algorithm) -> None:
        before = num_held()
        for _ in range(NUM_ROUNDS):
            train(algorithm, self.run, 0, 1)
        after = num_held()
        grown = {what: number - before[what] for what, number in after.items()}
        left = [f"{number} {what}" for what, number in grown.items() if number >= NUM_ROUNDS // 2]
        assert not left, f"{NUM_ROUNDS} steps left {' and '.join(left)}."
        rows = self._rows()[: self.run.group_size]
        num_before = num_alive(KINDS)
        for _ in range(NUM_SMALL_STEPS):
            step = self._step(rows, algorithm)
            learn(step, step.all_rows)
            del step
        num_kept = num_alive(KINDS) - num_before
        assert num_kept < NUM_SMALL_STEPS, (
            f"after {NUM_SMALL_STEPS} steps {num_kept} more tensors, samples or batches are kept: a run has thousands. "
            "Keep numbers, and as many as are needed."
        )
        step = self._step(self._rows(), algorithm)
        logprobs = step.trained_leaves["logprobs"].requires_grad_()
        loss = step.algorithm.loss(step.batch.tokens, logprobs, step.trained_leaves["entropy"], step.denominators)
        kept = weakref.ref(logprobs)
        del loss, logprobs
        gc.collect()
        assert kept() is None, (
            "the algorithm keeps logprobs of a micro-batch, and with them the activations of the whole forward pass: "
            "keep numbers, or detach()."
        )


def _train_there(subject: Any, runs: Sequence[RunInfo]) -> list[tuple[list[str], Learned]]:
    """Take two steps of each run with an algorithm, or with that of a test class."""
    steps: list[tuple[list[str], Learned]] = []
    for run in runs:
        algorithm: Algorithm = subject().make_algorithm() if isinstance(subject, type) else copy.deepcopy(subject)
        algorithm.setup(run)
        steps += train(algorithm, run, 0, 2)
    return steps


def _given(result: Advantages) -> list[torch.Tensor]:
    return [tensor for tensor in (result.of_sequences, result.of_tokens, result.returns) if tensor is not None]


def _in_group(row: Row, group: int) -> Row:
    return dataclasses.replace(row, sample=dataclasses.replace(row.sample, group=group))


def _per_token(step: Step, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the numbers of tokens of a micro-batch."""
    selected = step.batch.select(rows)
    places = step.batch.tokens_of(np.asarray(rows))[selected.per_token["response_mask"]]
    leaves = {name: leaf[places].clone().requires_grad_() for name, leaf in step.leaves.items()}
    entropy = leaves["entropy"] if step.algorithm.needs.entropy_gradient else leaves["entropy"].detach()
    return dict(step.algorithm.loss(selected.tokens, leaves["logprobs"], entropy, step.denominators).per_token)


def _place(sample: Any, group: Sequence[Any]) -> int:
    return next((index for index, other in enumerate(group) if other is sample), -1)


def _parts(sample: Any) -> tuple[Any, ...]:
    """Return a sample's values, so that they can be compared."""
    values = (getattr(sample, field.name) for field in dataclasses.fields(sample))
    return tuple(value.tobytes() if isinstance(value, np.ndarray) else repr(value) for value in values)
