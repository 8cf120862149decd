"""Which steps the validator scores, beside which step the engine generates, and what it leaves of the metrics."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rlplug.distributed.stop_signal import StopRequested
from rlplug.rollout.source import RolloutRequest
from rlplug.training.validation.config import ValidationConfig
from rlplug.training.validation.validator import Validator
from rlplug.types import Prompt, Sample, SamplingParams

PROMPTS = [Prompt(uid="0", token_ids=(1,), text="")]


def sample_of(version: int) -> Sample:
    return Sample(
        prompt=PROMPTS[0],
        group=0,
        token_ids=(1, 2),
        response_mask=(False, True),
        rollout_logprobs=(0.0, 0.0),
        completion="",
        finish_reason="stop",
        policy_version=version,
        rewards={"r": 1.0},
        reward=1.0,
    )


class Source:
    """Remembers what it was asked for, and loses what it generates beside a step if told so."""

    def __init__(self) -> None:
        self.beside: int | None = None
        self.loses = self.is_stopped = False
        self.metrics: dict[str, float] = {}

    def begin_held_out(self, request: Any) -> None:
        self.beside = request.policy_version

    @property
    def has_held_out(self) -> bool:
        return self.beside is not None

    def finish_held_out(self, num_samples: int) -> list[Sample] | None:
        version, self.beside = self.beside, None
        assert version is not None
        return None if self.loses else [sample_of(version)] * num_samples

    def sync_weights(self, version: int) -> None:
        self.version = version

    def generate(self, request: Any) -> list[Sample]:
        if self.is_stopped:
            raise StopRequested
        assert request.policy_version == self.version
        self.metrics = {"environment/failures": 0.0, "rollout/seconds": 9.0, "sync/seconds": 0.2}
        return [sample_of(request.policy_version)] * request.num_samples

    def pop_metrics(self) -> dict[str, float]:
        metrics, self.metrics = self.metrics, {"environment/failures": 0.0}
        return metrics


@pytest.fixture
def validator_of():
    def make(**options: Any) -> tuple[Validator, Source, list[str]]:
        source: Any = Source()
        phases: list[str] = []

        @contextmanager
        def phase(name: str):
            phases.append(name)
            yield

        data: Any = SimpleNamespace(val_prompts=PROMPTS, val_sources=())
        rewards: Any = SimpleNamespace(check=lambda samples, ranks: None, names=["r"])
        ranks: Any = SimpleNamespace(gather_arrays=lambda array: array)
        config = ValidationConfig(**options)
        request = RolloutRequest((), config.num_samples, SamplingParams(8), "validate/0", 0)
        validator = Validator(config, request, source, data, list, rewards, ranks, phase)
        return validator, source, phases

    return make


def scored(validator: Validator, num_steps: int) -> list[int]:
    """Take steps, each of which raises the version of the policy; return the steps that got scores, in order."""
    found = []
    for step in range(1, num_steps + 1):
        validator.begin_step(step - 1, step - 1)
        for validation in validator.end_step(step, step, is_last=step == num_steps):
            assert {sample.policy_version for sample in validation.samples} == {validation.step}
            found.append(validation.step)
    return found


def test_the_policy_after_a_step_is_scored_between_steps_or_beside_the_next(validator_of):
    """It would catch scores that are given to the policy of another step, and a last step that nobody scores."""
    between, _, phases = validator_of(every_n_steps=2)
    assert (scored(between, 6), phases) == ([2, 4, 6], ["validate"] * 3)
    beside, source, phases = validator_of(every_n_steps=2, beside_training=True)
    assert (scored(beside, 6), phases) == ([2, 4, 6], ["validate"] * 3)
    assert not source.has_held_out


def test_the_next_policy_is_scored_where_an_engine_lost_the_former(validator_of):
    validator, source, _ = validator_of(every_n_steps=2, beside_training=True)
    source.loses = True
    with pytest.warns(UserWarning, match="The validation after step 2 is left out: .* There is one after step 3"):
        assert scored(validator, 3) == [3]


def test_metrics_of_the_training_rollout_outlive_a_validation(validator_of):
    """Else the log would have the failures and seconds of the validation's rollout, in the steps that validate."""
    validator, source, _ = validator_of(every_n_steps=1)
    of_training = {"environment/failures": 3.0, "rollout/seconds": 5.0, "sync/seconds": 0.1}
    source.metrics = dict(of_training)
    validator.run(1, 1)
    assert source.pop_metrics() | validator.pop_metrics() == of_training | {"sync/seconds": 0.2}
    assert validator.pop_metrics() == {}
    source.metrics, source.is_stopped = dict(of_training), True
    with pytest.raises(StopRequested):
        validator.run(2, 2)
    assert validator.pop_metrics() == of_training
