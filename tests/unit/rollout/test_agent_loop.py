"""The agent loop with real engines: requests, appended tokens, failures, limits and partial rollouts."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import time
import weakref

import conversations
import pytest
import torch
from capable_engines import CapableRollout
from conversations import AsyncCounting, Counting, Hanging, Raising, Wrong
from rlplug_async.source import PartialSource
from rlplug_devkit.padded_rows import PaddedRows

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.source import RolloutRequest
from rlplug.types import Prompt, SamplingParams, StepBatch

PROMPTS = [Prompt(uid=str(number), token_ids=(3, 4 + number), text="") for number in range(3)]
ENGINES = [HFRollout, CapableRollout]


class DyingRollout(CapableRollout):
    """Dies in the middle of its second batch of turns."""

    num_collects = 0

    def collect(self, timeout_s):
        completions = super().collect(timeout_s)
        self.num_collects += 1
        if self.num_collects == 4:
            raise EngineFault("it died.", completions)
        return completions


class DiesAtSubmit(CapableRollout):
    """Is dead when it is asked for its third batch of turns."""

    num_submits = 0

    def submit(self, requests, sampling):
        self.num_submits += 1
        if self.num_submits == 3:
            raise EngineFault("it died.")
        super().submit(requests, sampling)


class AbortsAlone(CapableRollout):
    """Aborts what nobody told it to abort, in a call that returns all completions."""

    capabilities = dataclasses.replace(CapableRollout.capabilities, streaming=False)

    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        nothing = {"token_ids": [], "logprobs": [], "finish_reason": "abort"}
        return [dataclasses.replace(each, **nothing) for each in completions]


@pytest.mark.filterwarnings("ignore:.*restarts")
def test_requests_that_an_engine_aborts_alone_are_a_fault(make_generator):
    """It catches a loop that asks for the rest of them for ever."""
    generator = make_generator(AbortsAlone())
    with pytest.raises(RunError, match=r"AbortsAlone failed again after 2 restarts.*aborted request .*, on its own"):
        generate(generator, max_new_tokens=3)
    generator.close()


def generate(generator, max_new_tokens=20, prompts=PROMPTS, num_samples=2):
    return generator.generate(
        RolloutRequest(prompts, num_samples, SamplingParams(max_new_tokens), "0/1", policy_version=1)
    )


def tokens_of(samples):
    return [(sample.group, sample.token_ids.tolist(), sample.response_mask.tolist()) for sample in samples]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_trainer_has_the_engines_logprobs_over_five_turns(engine, make_generator):
    generator = make_generator(engine(), Counting)
    samples = generate(generator)
    assert [sample.num_turns for sample in samples] == [5] * 6
    assert [sample.reward for sample in samples] == [5.0] * 6
    batch = PaddedRows.of(StepBatch.from_samples(samples))
    assert (~batch.response_mask & batch.attention_mask).sum() == 6 * (2 + 4)  # prompts, and four observations each
    trainer = policy_forward(generator.policy, pack(batch.flat()), SamplingParams(20), "none").tokens.sampled_logprobs
    torch.testing.assert_close(trainer, batch.trained(batch.rollout_logprobs), rtol=0, atol=1e-4)


def test_an_engine_that_streams_samples_what_one_that_does_not_samples(make_generator):
    expected = tokens_of(generate(make_generator(HFRollout(), Counting)))
    assert tokens_of(generate(make_generator(CapableRollout(), Counting))) == expected
    assert tokens_of(generate(make_generator(CapableRollout(), AsyncCounting))) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_environments_see_their_own_turns_in_order(engine, make_generator):
    made = []

    def make():
        made.append(Counting(3))
        return made[-1]

    generator = make_generator(engine(), make)
    samples = generate(generator)
    tokenizer = generator._tokenizer
    turns = {
        (
            sample.prompt.uid,
            *(
                tokenizer.decode([t for t in sample.token_ids[s.start : s.end].tolist() if t != 1])
                for s in sample.segments
            ),
        )
        for sample in samples
    }
    assert {(each.seen[0][0], *each.seen[1:]) for each in made} == turns
    assert len({each.seen[0][1] for each in made}) == 6  # seeds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("environment", "message"),
    [(Raising, "ValueError: the world ended (at conversations.py:38)"), (Hanging, "took longer than 0.5 s")],
)
def test_a_failed_environment_costs_its_own_trajectory(engine, environment, message, make_generator):
    options = TurnOptions(max_tokens_per_turn=3, step_deadline_s=0.5)
    generator = make_generator(engine(), environment, options)
    samples = generate(generator)
    assert [sample.prompt.uid for sample in samples if sample.errors] == ["1", "1"]
    file = os.path.relpath(conversations.__file__)  # of a plugin: its distribution and version
    source = f"{environment.__name__}.step in {file}"
    assert {sample.errors["environment"].message for sample in samples if sample.errors} == {f"{source}: {message}"}
    assert [sample.num_turns for sample in samples] == [5, 5, 2, 2, 5, 5]
    assert generator.pop_metrics()["environment/failures"] == 2
    batch = PaddedRows.of(StepBatch.from_samples(samples))
    assert not batch.response_mask[2:4].any()


def test_wrong_answers_are_failures(make_generator):
    samples = generate(make_generator(HFRollout(), Wrong))
    assert [bool(sample.errors) for sample in samples] == [False, False, True, True, True, True]
    assert "step returned str 'what?' and not a StepResult" in samples[2].errors["environment"].message
    assert "step returned the reward nan" in samples[4].errors["environment"].message


@pytest.mark.filterwarnings("ignore:D.*restarts")
@pytest.mark.parametrize("dying", [DyingRollout, DiesAtSubmit])
def test_an_engine_that_dies_between_turns_goes_on_where_it_was(dying, make_generator):
    expected = tokens_of(generate(make_generator(HFRollout(), Counting)))
    made = []

    def make():
        made.append(Counting())
        return made[-1]

    generator = make_generator(dying(), make)
    samples = generate(generator)
    assert generator.driver.pop_metrics()["rollout/restarts"] == 1
    assert tokens_of(samples) == expected
    assert [len(each.seen) for each in made] == [6] * 6  # no turn was answered twice


@pytest.mark.parametrize("engine", ENGINES)
def test_limits_of_turns_and_tokens(engine, make_generator):
    two = TurnOptions(max_turns=2, max_tokens_per_turn=3)
    samples = generate(make_generator(engine(), Counting, two))
    assert {(sample.num_turns, sample.finish_reason) for sample in samples} == {(2, "length")}
    samples = generate(make_generator(engine(), Counting), max_new_tokens=6)
    assert all(len(sample.token_ids) - 2 <= 6 and sample.finish_reason == "length" for sample in samples)
    assert all(sample.response_mask[-1] for sample in samples)  # no observation without a turn after it
    samples = generate(make_generator(engine(), functools.partial(Counting, 1)))
    assert {(sample.num_turns, sample.finish_reason) for sample in samples} == {(1, "stop")}


def source_of(generator, options, prompts_per_step=3):
    source = PartialSource(options, prompts_per_step)
    source.start(generator)
    return source


def partial_run(generator, options, num_steps, max_new_tokens=12):
    """Return what each step trains on, with a policy that has a new version each step and never new weights."""
    source, steps = source_of(generator, options), []
    state = source
    for step in range(1, num_steps + 1):
        prompts = PROMPTS[: state.num_prompts_wanted(3, 1.0)]
        how = (2, SamplingParams(max_new_tokens), f"0/{step}", step)
        steps.append(source.next_groups(RolloutRequest(prompts, *how), num_missing=3, num_drawn=0))
    return steps, state


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("environment", [None, Counting])
def test_a_partial_rollout_has_every_token_once(engine, environment, make_generator):
    """Trajectories of 12 tokens, 4 a step: complete in their third step, with three versions."""
    options = TurnOptions() if environment is None else TurnOptions(max_tokens_per_turn=3)
    generator = make_generator(engine(), environment, options)
    steps, _ = partial_run(generator, PartialRollout(max_tokens_per_step=4), num_steps=6)
    samples = [sample for step in steps for sample in step]
    assert samples
    for number, step in enumerate(steps, start=1):
        for sample in step:
            segments = sample.segments
            ours = [index for segment in segments for index in range(segment.start, segment.end)]
            assert ours == [index for index, is_ours in enumerate(sample.response_mask) if is_ours]
            by_version = {}
            for segment in segments:
                by_version[segment.policy_version] = (
                    by_version.get(segment.policy_version, 0) + segment.end - segment.start
                )
            assert max(by_version.values()) <= 4
            assert max(by_version) <= number
            assert len(sample.token_ids) - 2 <= 12
    assert max(len({s.policy_version for s in sample.segments}) for sample in samples) == 3
    batch = PaddedRows.of(StepBatch.from_samples(samples))
    trainer = policy_forward(generator.policy, pack(batch.flat()), SamplingParams(12), "none").tokens.sampled_logprobs
    torch.testing.assert_close(trainer, batch.trained(batch.rollout_logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("environment", [None, Counting])
def test_a_partial_rollout_resumes_exactly(environment, make_generator):
    options = PartialRollout(max_tokens_per_step=4, groups_in_flight=3)
    turns = TurnOptions() if environment is None else TurnOptions(max_tokens_per_turn=3)
    whole, _ = partial_run(make_generator(HFRollout(), environment, turns), options, num_steps=5)
    first, state = partial_run(make_generator(HFRollout(), environment, turns), options, num_steps=2)
    # with no environment of the trajectories that it goes on with
    resumed = source_of(make_generator(HFRollout(), environment, turns), options)
    resumed.load_state_dict(state.state_dict(list), {prompt.uid: prompt for prompt in PROMPTS}, 2, 12, turns)
    rest = []
    for step in (3, 4, 5):
        prompts = PROMPTS[: resumed.num_prompts_wanted(3, 1.0)]
        request = RolloutRequest(prompts, 2, SamplingParams(12), f"0/{step}", step)
        rest.append(resumed.next_groups(request, num_missing=3, num_drawn=0))
    found = [[(s.token_ids.tolist(), s.segments, s.reward) for s in step] for step in [*first, *rest]]
    assert found == [[(s.token_ids.tolist(), s.segments, s.reward) for s in step] for step in whole]
    assert any(len({s.policy_version for s in sample.segments}) > 1 for step in rest for sample in step)


def test_generation_is_broken_off_after_its_time(make_generator):
    class Slow(CapableRollout):
        def _run(self, request, sampling):
            time.sleep(0.3 * (request.request_id.count("/2/") > 0) * 10)
            super()._run(request, sampling)

    generator = make_generator(Slow())
    options = PartialRollout(max_seconds_per_step=1.0)
    source = source_of(generator, options)
    state = source
    samples = source.next_groups(RolloutRequest(PROMPTS, 1, SamplingParams(8), "0/1", 1), 3, 0)
    assert sorted(sample.prompt.uid for sample in samples) == ["0", "1"]
    assert [trajectory.prompt.uid for trajectory in state.all_trajectories[:1]] == ["2"]


@pytest.mark.parametrize("environment", [None, functools.partial(Counting, 2)])
def test_generation_ends_when_enough_groups_are_complete(environment, make_generator):
    class Straggling(CapableRollout):
        """Does not begin with the third group until it is told to abort something."""

        is_free = False

        def abort(self, request_ids):
            super().abort(request_ids)
            self.is_free = True

        def _run(self, request, sampling):
            while request.request_id.startswith("0/1/2/") and not self.is_free:
                time.sleep(0.01)
            super()._run(request, sampling)

    generator = make_generator(Straggling(), environment)
    source = source_of(generator, PartialRollout(over_provisioning=1.5), 2)
    state = source
    assert state.num_prompts_wanted(2, 1.0) == 3
    samples = source.next_groups(RolloutRequest(PROMPTS, 2, SamplingParams(8), "0/1", 1), 2, 0)
    assert [sample.prompt.uid for sample in samples] == ["0", "0", "1", "1"]
    assert [trajectory.prompt.uid for trajectory in state.all_trajectories[:1]] == ["2"]
    later = []
    for step in (2, 3):  # the third group must train by then, at the latest
        request = RolloutRequest(PROMPTS[: state.num_prompts_wanted(2, 1.0)], 2, SamplingParams(8), f"0/{step}", step)
        later += source.next_groups(request, 2, 0)
    assert len(later) == 8
    assert "2" in {sample.prompt.uid for sample in later}
    assert len(state.queue.open) == 1


def test_the_oldest_complete_groups_train_first(make_generator):
    generator = make_generator(HFRollout())
    source = source_of(generator, PartialRollout(max_tokens_per_step=100, groups_in_flight=3))
    samples = source.next_groups(RolloutRequest(PROMPTS, 1, SamplingParams(4), "0/1", 1), 1, 0)
    assert [sample.prompt.uid for sample in samples] == ["0"]
    samples = source.next_groups(RolloutRequest([PROMPTS[0]], 1, SamplingParams(4), "0/2", 2), 2, 0)
    assert [(sample.prompt.uid, sample.policy_version, sample.group) for sample in samples] == [
        ("1", 1, 1),
        ("2", 1, 2),
    ]
    assert [trajectory.group for trajectory in source.all_trajectories] == [3]


def test_environments_of_validations_are_let_go(make_generator):
    """It catches a partial rollout whose memory grows by those of each validation."""
    made = []

    def make():
        environment = Counting(2)
        made.append(weakref.ref(environment))
        return environment

    generator = make_generator(HFRollout(), make)
    source = source_of(generator, PartialRollout(max_tokens_per_step=100))
    source.next_groups(RolloutRequest(PROMPTS, 1, SamplingParams(20), "0/1", 1), 3, 0)
    generate(generator)
    ends_at = time.monotonic() + 20
    while any(environment() is not None for environment in made):
        assert time.monotonic() < ends_at
        source.pop_metrics()
        gc.collect()
        time.sleep(0.01)
    assert len(made) == 9
