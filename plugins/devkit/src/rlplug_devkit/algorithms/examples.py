"""Worked examples: small steps with what an algorithm's equations make of them, which only its author can know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from rlplug.errors import ConfigError, describe
from rlplug.interfaces.algorithm import Advantages, Algorithm, RunInfo
from rlplug.types import Prompt, RewardError, Sample
from rlplug_devkit.algorithms.checks import AlgorithmChecks
from rlplug_devkit.algorithms.passes import Step, is_close, learn, step_of
from rlplug_devkit.algorithms.steps import Row, batch_of
from rlplug_devkit.claims import DOES_NOT_APPLY

Numbers: TypeAlias = Sequence[float]
GRADIENTS: Final = {"gradient": "logprobs", "entropy_gradient": "entropy", "value_gradient": "values"}
"""What each derivative of a worked example is a derivative in."""


@dataclass(frozen=True)
class Completion:
    """A completion of a worked example: lists have a number of each of its tokens, all of which train.

    Attributes:
        reward: Its reward; ``None`` where that failed.
        logprobs: Of the policy that learns.
        old_logprobs: Of the policy before the update; ``logprobs`` where nothing is given.
        ref_logprobs: Of the reference policy; ``old_logprobs`` where nothing is given.
        rollout_logprobs: Of the engine; ``old_logprobs`` where nothing is given.
        values: Of the critic before the update; 0 where nothing is given.
        new_values: Of the critic that learns; ``values`` where nothing is given.
        entropy: Of the policy; 0 where nothing is given.
        group: Number of its prompt.
        truncated: Whether it reached the longest length.
    """

    reward: float | None
    logprobs: Numbers
    old_logprobs: Numbers | None = None
    ref_logprobs: Numbers | None = None
    rollout_logprobs: Numbers | None = None
    values: Numbers | None = None
    new_values: Numbers | None = None
    entropy: Numbers | None = None
    group: int = 0
    truncated: bool = False


@dataclass(frozen=True)
class WorkedExample:
    """A small step, and what the equations make of it, by hand or by code that is not the algorithm's.

    What is ``None`` is not compared. Losses are those of the step as a single mini-batch. Of a completion whose reward
    failed no token trains, and its numbers are not compared.

    Attributes:
        completions: The step.
        selected: Places of those that ``select`` keeps. The step trains all of ``completions`` in any case.
        advantages: Of each completion: one number, or one of each token; 0 where tokens do not train.
        returns: The critic's targets, of each completion one of each token.
        trains: Of each completion, whether its tokens train: 1 or 0.
        loss: The policy's loss.
        gradient: Its derivative in ``logprobs``.
        entropy_gradient: Its derivative in ``entropy``.
        value_loss: The critic's loss.
        value_gradient: Its derivative in ``new_values``.
        metrics: Some of the metrics of advantages and losses, maxima and minima, by name.
        per_token: Some of the numbers of tokens that train, by name; of each completion one of each token.
        observed: Metrics of steps before this one, each of which ``after_step`` gets.
        options: Arguments of the algorithm's class; ``None`` for what ``make_algorithm`` returns.
        run: The run; ``None`` for that of the kit.
    """

    completions: Sequence[Completion]
    selected: Sequence[int] | None = None
    advantages: Sequence[float | Numbers] | None = None
    returns: Sequence[Numbers] | None = None
    trains: Sequence[float] | None = None
    loss: float | None = None
    gradient: Sequence[Numbers] | None = None
    entropy_gradient: Sequence[Numbers] | None = None
    value_loss: float | None = None
    value_gradient: Sequence[Numbers] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_token: Mapping[str, Sequence[Numbers]] = field(default_factory=dict)
    observed: Sequence[Mapping[str, float]] = ()
    options: Mapping[str, Any] | None = None
    run: RunInfo | None = None


class ExampleChecks(AlgorithmChecks):
    """Checks of an algorithm's own equations and options. Without them a kit cannot tell one equation from another.

    Attributes:
        accepted_options: Arguments of the class that it must take, such as the ends of a range.
        refused_options: Arguments that its constructor, or ``setup`` for the kit's run, must refuse.
    """

    accepted_options: ClassVar[Sequence[Mapping[str, Any]]] = ()
    refused_options: ClassVar[Sequence[Mapping[str, Any]]] = ()

    def examples(self) -> Sequence[WorkedExample]:
        """Return worked examples of the algorithm's equations, such as those of its paper; none by default."""
        return ()

    def test_worked_examples_come_out(self) -> None:
        """What the author worked out by hand, or by other code, is what the algorithm computes."""
        examples = self.examples()
        if not examples:
            pytest.skip(f"{DOES_NOT_APPLY}examples returns none")
        for number, example in enumerate(examples):
            options = "" if example.options is None else f" with {dict(example.options)}"
            try:
                problem = self._problem_of(example)
            except Exception as error:  # noqa: BLE001 - the algorithm's own
                pytest.fail(f"worked example {number}{options} raised {describe(error)}.", pytrace=False)
            assert not problem, f"in worked example {number}{options}, {problem}."

    def test_options_are_taken_or_refused(self) -> None:
        """A mistake in a configuration is a ConfigError before a run begins, and nothing else is one."""
        if not (self.accepted_options or self.refused_options):
            pytest.skip(f"{DOES_NOT_APPLY}accepted_options and refused_options are empty")
        for options in self.accepted_options:
            try:
                self._made(options).setup(self.run)
            except Exception as error:  # noqa: BLE001 - the algorithm's own
                pytest.fail(f"with {dict(options)} it raised {describe(error)}.", pytrace=False)
        for options in self.refused_options:
            try:
                self._made(options).setup(self.run)
            except ConfigError:
                continue
            except Exception as error:  # noqa: BLE001 - the algorithm's own
                pytest.fail(f"with {dict(options)} it raised {describe(error)}: a ConfigError says it.", pytrace=False)
            pytest.fail(f"{dict(options)} is accepted: raise a ConfigError that says what to give.", pytrace=False)

    def _made(self, options: Mapping[str, Any] | None) -> Algorithm:
        algorithm = self.make_algorithm()
        return algorithm if options is None else type(algorithm)(**options)

    def _problem_of(self, example: WorkedExample) -> str:
        """Return in words where an algorithm differs from an example; empty where it does not."""
        algorithm, run = self._made(example.options), example.run or self.run
        algorithm.setup(run)
        for metrics in example.observed:
            algorithm.after_step(metrics)
        rows = [_row(place, each) for place, each in enumerate(example.completions)]
        chosen = _selected(algorithm, rows)
        if example.selected is not None and chosen != sorted(example.selected):
            return f"select keeps the completions {chosen}, and {sorted(example.selected)} are expected"
        result = algorithm.advantages(batch_of(rows, algorithm.needs))
        step = step_of(algorithm, rows, result)
        found = _found(step, rows, result)
        for name, expected in _expected(example).items():
            if name not in found:
                return f"there is no {name}"
            if not is_close(found[name].double(), expected, self.tolerance):
                return f"{name} is {_rounded(found[name])}, and {_rounded(expected)} is expected"
        return ""


def _row(place: int, completion: Completion) -> Row:
    """Return a completion as the kit's steps have them, after a prompt of one token."""
    size = 1 + len(completion.logprobs)

    def numbers(given: Numbers | None, other: Numbers) -> Any:
        return np.concatenate([[0.0], np.asarray(other if given is None else given, np.float64)]).astype(np.float32)

    zeros = [0.0] * len(completion.logprobs)
    old = completion.logprobs if completion.old_logprobs is None else completion.old_logprobs
    values = zeros if completion.values is None else completion.values
    is_failed = completion.reward is None
    sample = Sample(
        prompt=Prompt(f"prompt-{completion.group}", (1,), "?", ""),
        group=completion.group,
        token_ids=np.arange(size, dtype=np.int32) % 7 + 1,
        response_mask=np.arange(size) > 0,
        rollout_logprobs=numbers(completion.rollout_logprobs, old),
        completion=f"completion {place}",
        finish_reason="length" if completion.truncated else "stop",
        policy_version=0,
        rewards={"made": RewardError("it failed") if is_failed else completion.reward or 0.0},
        reward=completion.reward or 0.0,
    )
    return Row(
        sample,
        logprobs=numbers(None, completion.logprobs),
        old_logprobs=numbers(None, old),
        ref_logprobs=numbers(completion.ref_logprobs, old),
        values=numbers(None, values),
        entropy=numbers(completion.entropy, zeros),
        new_values=numbers(completion.new_values, values),
    )


def _selected(algorithm: Algorithm, rows: Sequence[Row]) -> list[int]:
    samples = [row.sample for row in rows]
    groups = [[each for each in samples if each.group == group] for group in {each.group for each in samples}]
    chosen = {id(sample) for group in groups for sample in algorithm.select(group)}
    return [place for place, sample in enumerate(samples) if id(sample) in chosen]


def _found(step: Step, rows: Sequence[Row], result: Advantages) -> dict[str, Tensor]:
    """Return what an algorithm made of an example, by the names of ``WorkedExample``: numbers of each token, or one."""
    algorithm, batch, leaves = step.algorithm, step.batch.tokens, step.trained_leaves
    given, learned = batch_of(rows), learn(step, step.all_rows)
    num_tokens, inside = given.num_tokens, torch.from_numpy(given.per_token["response_mask"])
    found = {name: learned.gradients[leaf][inside] for name, leaf in GRADIENTS.items()}
    policy = algorithm.loss(batch, leaves["logprobs"], leaves["entropy"], step.denominators)
    found["loss"] = policy.loss
    if algorithm.needs.critic:
        found["value_loss"] = algorithm.value_loss(batch, leaves["values"], step.denominators).loss
    tensors = {"returns": result.returns, "advantages": result.of_tokens}
    if result.of_sequences is not None:
        tensors["advantages"] = result.of_sequences.repeat_interleave(num_tokens)
    found |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    found["trains"] = torch.ones(int(num_tokens.sum())) if result.trains is None else result.trains.float()
    if "advantages" in found:
        found["advantages"] = found["advantages"] * found["trains"]
    numbers = {**result.metrics, **learned.metrics, **learned.maxima, **learned.minima}
    found |= {name: torch.tensor(float(number)) for name, number in numbers.items()}
    return found | {f"per_token {name}": tensor.float() for name, tensor in policy.per_token.items()}


def _expected(example: WorkedExample) -> dict[str, Tensor]:
    """Return what an example expects, by the same names: float64 [K] in the order of tokens, or []."""
    lengths = [0 if each.reward is None else len(each.logprobs) for each in example.completions]
    expected: dict[str, Tensor] = {name: torch.tensor(number).double() for name, number in example.metrics.items()}
    given: dict[str, Sequence[float | Numbers] | None] = {
        name: getattr(example, name) for name in ("advantages", "returns", "trains", *GRADIENTS)
    }
    given |= {f"per_token {name}": numbers for name, numbers in example.per_token.items()}
    for name, per_completion in given.items():
        if per_completion is not None:
            per_token = [
                [numbers] * length if isinstance(numbers, int | float) else list(numbers[:length])
                for numbers, length in zip(per_completion, lengths, strict=True)
            ]
            expected[name] = torch.tensor([number for numbers in per_token for number in numbers]).double()
    for name in ("loss", "value_loss"):
        if (number := getattr(example, name)) is not None:
            expected[name] = torch.tensor(number).double()
    return expected


def _rounded(tensor: Tensor) -> Any:
    return [round(x, 6) for x in tensor.tolist()] if tensor.dim() else round(float(tensor), 6)
