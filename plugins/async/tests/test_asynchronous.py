"""Generation beside the training, with a real engine in a real thread: what is trained, and what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from capable_engines import CapableRollout
from conversations import Counting, Hanging
from rlplug_algos.corrections import Correction
from rlplug_algos.grpo import GRPO
from rlplug_async.asynchronous import AsynchronousSource
from rlplug_async.background import BackgroundGeneration
from rlplug_async.option_checks import check_options, check_partial_rollout
from rlplug_devkit.padded_rows import PaddedRows
from virtual_world import run_case

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineCapabilities, EngineFault
from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.source import RolloutRequest
from rlplug.types import Completion, Prompt, SamplingParams, StepBatch

pytestmark = pytest.mark.kit

PROMPTS = [Prompt(uid=str(number), token_ids=(3, 4 + number % 6), text="") for number in range(30)]
TURNS = TurnOptions(max_turns=8, max_tokens_per_turn=3, step_deadline_s=20)
OPTIONS = PartialRollout(asynchronous=True, max_staleness=1)


class ServerLike(CapableRollout):
    """Streams from threads, on a device that is not the trainer's as far as anyone can tell."""

    capabilities = EngineCapabilities(streaming=True, colocated=False, disaggregated=True)


class Run:
    """Steps of two groups, with a policy that has a new version each step and never new weights."""

    def __init__(self, generator, options=OPTIONS, num_drawn=0, step=0):
        self.generator, self.num_drawn, self.step = generator, num_drawn, step
        self.source = AsynchronousSource(options, 2)
        self.source.start(generator)
        self.state = self.source
        self.samples, self.bound = [], 1

    def take(self, max_new_tokens=12):
        self.step += 1
        self.source.pause()
        prompts = PROMPTS[self.num_drawn : self.num_drawn + self.state.num_prompts_wanted(2, 1.0)]
        self.num_drawn += len(prompts)
        request = RolloutRequest(prompts, 2, SamplingParams(max_new_tokens), f"0/{self.step}", self.step)
        self.source.sync_weights(self.step)
        samples = self.source.next_groups(request, num_missing=2, num_drawn=0)
        assert len({sample.prompt.uid for sample in samples}) == 2
        assert all(self.step - sample.policy_version <= self.bound for sample in samples if not sample.errors)
        self.samples += samples
        return samples


@pytest.mark.parametrize("environment", [None, Counting])
def test_groups_that_train_late_have_every_token_once(environment, make_generator):
    run = Run(make_generator(ServerLike(), environment, TURNS))
    for _ in range(4):
        run.take()
    run.source.pause()
    assert len(run.state.queue.open) == 2
    trained = [int(sample.prompt.uid) for sample in run.samples[::2]]
    assert sorted(trained + [int(t.prompt.uid) for t in run.state.all_trajectories[::2]]) == list(range(run.num_drawn))
    batch = PaddedRows.of(StepBatch.from_samples(run.samples))
    trainer = policy_forward(
        run.generator.policy, pack(batch.flat()), SamplingParams(12), "none"
    ).tokens.sampled_logprobs
    torch.testing.assert_close(trainer, batch.trained(batch.rollout_logprobs), rtol=0, atol=1e-4)
    metrics = run.source.pop_metrics()
    assert metrics["partial/wait_s"] > 0
    assert metrics["partial/engine_idle_s"] > 0
    run.source.close()


def test_a_run_is_repeated_group_by_group(make_generator, tmp_path):
    """It catches a repetition that trains on what is complete first, where an engine ends groups in another order."""

    class LateAtFirst(ServerLike):
        def submit(self, requests, sampling):
            is_first = [request.request_id.split("/")[2] in ("0", "1") for request in requests]
            late = [request for request, its_first in zip(requests, is_first, strict=True) if its_first]
            threading.Timer(0.5, super().submit, (late, sampling)).start()
            super().submit([request for request in requests if request not in late], sampling)

    def trained(engine, replay=None, num_steps=4):
        options = PartialRollout(asynchronous=True, max_staleness=3, replay=replay)
        run = Run(make_generator(engine), options)
        run.bound = 3
        run.state.identify(0, {"uids": "abc"}, group_size=2, num_steps=num_steps)
        lines = []
        for step in range(1, num_steps + 1):
            run.state.schedule.begin(step)
            run.take(max_new_tokens=4)
            lines.append(run.state.schedule.line())
        run.source.close()
        return lines

    lines, path = trained(LateAtFirst()), tmp_path / "groups.jsonl"
    path.write_text("".join(lines))
    assert json.loads(lines[0])["groups"] != [[0, 1]], "the engine did not change the order"
    assert trained(ServerLike(), str(path)) == lines
    for text, message in (
        ("".join(lines)[:-2], "line 4 of .* is torn"),
        ("".join(lines[:1] + lines[2:]), "lacks step 2"),
        ("".join([lines[0], *lines]), "has step 1 twice"),
        ("".join(lines).replace('"seed": 0', '"seed": 1'), "other values of the seed: it has 1, and this run 0"),
        ("".join(lines).replace('"data": "', '"data": "x'), "other values of the training prompts or their order"),
        ('{"step": 1, "groups": [0]}\n', "line 1 of .* is not a step and its groups"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"model.partial_rollout.replay: .*{message}"):
            trained(ServerLike(), str(path))


def test_engines_generate_while_the_policy_trains(make_generator):
    run = Run(make_generator(ServerLike()))
    run.take()
    ends_at = time.monotonic() + 10
    while len(run.state.complete()) < 2:  # the update, in which nobody asks for groups
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    run.source.close()


@pytest.mark.parametrize(
    ("max_new_tokens", "updates_s", "side"), [(30, 0.0, "the trainer waited"), (4, 0.5, "the engine had nothing")]
)
def test_the_run_says_which_side_waits(max_new_tokens, updates_s, side, make_generator, monkeypatch):
    said = []
    monkeypatch.setattr("rlplug_async.asynchronous.rank_zero_info", said.append)
    monkeypatch.setattr("rlplug_async.asynchronous.NUM_MEASURED", 2)
    run = Run(make_generator(ServerLike()))
    for _ in range(4):
        run.take(max_new_tokens)
        time.sleep(updates_s)
    assert any(side in message for message in said)
    run.source.close()


def test_a_slow_environment_is_neither_waited_for_nor_asked_twice(make_generator):
    """A pause leaves its call; a later step has the answer, and a new process asks with the same turns."""
    is_free, made = threading.Event(), []

    class Slow(Counting):
        def step(self, completion):
            if self.seen[0][0] == "1" and len(self.seen) == 2:
                is_free.wait(20)
            return super().step(completion)

    def make():
        made.append(Slow(3))
        return made[-1]

    run = Run(make_generator(ServerLike(), make, TURNS))
    run.take()
    began = time.monotonic()
    run.source.pause()
    assert time.monotonic() - began < 5
    assert any(each.awaits_answer for each in run.state.all_trajectories)
    plain, prompts = run.state.state_dict(list), {prompt.uid: prompt for prompt in PROMPTS}
    is_free.set()
    run.take()
    run.take()
    assert all(len(each.seen) <= 4 for each in made)
    assert "1" in {sample.prompt.uid for sample in run.samples}
    run.source.close()

    resumed = Run(make_generator(ServerLike(), lambda: Counting(3), TURNS), num_drawn=4, step=1)
    resumed.source.load_state_dict(plain, prompts, 1, 12, TURNS)
    resumed.take()
    resumed.take()
    assert "1" in {sample.prompt.uid for sample in resumed.samples}
    assert {sample.num_turns for sample in resumed.samples} == {3}
    resumed.source.close()


def test_an_environment_that_hangs_costs_its_own_trajectories(make_generator):
    options = TurnOptions(max_tokens_per_turn=3, step_deadline_s=0.5)
    run = Run(make_generator(ServerLike(), Hanging, options))
    for _ in range(3):
        run.take()
    failed = [sample for sample in run.samples if sample.errors]
    assert [sample.prompt.uid for sample in failed] == ["1", "1"]
    assert "took longer than 0.5 s" in failed[0].errors["environment"].message
    run.source.close()


class Recording(ServerLike):
    """Keeps what each request was sampled with, and dies when it is told to, before a validation is complete."""

    is_mortal = False

    def start(self, policy, placement):
        super().start(policy, placement)
        self.submitted, self.dies_next = {}, False

    def submit(self, requests, sampling):
        self.submitted |= {request.request_id: sampling for request in requests}
        withheld = [each for each in requests if self.is_mortal and each.request_id.startswith("validate")]
        super().submit([request for request in requests if request not in withheld], sampling)

    def collect(self, timeout_s):
        if self.dies_next:
            self.is_mortal = False
            raise EngineFault("it died.")
        return super().collect(timeout_s)


@pytest.mark.filterwarnings("ignore:.*restarts")
@pytest.mark.parametrize(("environment", "dies"), [(None, False), (Counting, False), (Counting, True)])
def test_a_validation_beside_the_training_keeps_to_its_weights(environment, dies, make_generator):
    """It catches tokens of newer weights, sampling of the training, and a restart that goes on with newer weights."""
    held_out = RolloutRequest(PROMPTS[-3:], 2, SamplingParams(12, temperature=0.0), "validate/0", 1)
    apart = make_generator(ServerLike(), environment, TURNS)
    expected = {(each.prompt.uid, tuple(each.token_ids.tolist())) for each in apart.generate(held_out)}
    apart.close()
    engine = Recording()
    engine.is_mortal = dies
    run = Run(make_generator(engine, environment, TURNS))
    run.source.begin_held_out(held_out)
    run.take()
    weight = next(run.generator.policy.parameters())
    before = weight.detach().clone()
    weight.data.mul_(-1.0)  # the update
    engine.dies_next = dies
    samples = run.source.finish_held_out(2)
    weight.data.copy_(before)
    if dies:
        assert samples is None
    else:
        assert {(each.prompt.uid, tuple(each.token_ids.tolist())) for each in samples} == expected
        of_validation = {name: sampling for name, sampling in engine.submitted.items() if name.startswith("validate")}
        assert {sampling.temperature for sampling in of_validation.values()} == {0.0}
        assert {sampling.temperature for sampling in (engine.submitted | of_validation).values()} == {0.0, 1.0}
        assert run.source.pop_metrics()["partial/validation_wait_s"] >= 0
    run.take()  # without it
    assert run.generator.driver.pop_metrics()["rollout/restarts"] == dies
    run.source.begin_held_out(dataclasses.replace(held_out, policy_version=3))
    run.take()
    again = run.source.finish_held_out(2)
    assert {(each.prompt.uid, tuple(each.token_ids.tolist())) for each in again} == expected
    assert {segment.policy_version for each in again for segment in each.segments} == {3}
    run.source.close()


@pytest.mark.filterwarnings("ignore:.*restarts")
def test_an_engine_that_dies_while_the_policy_trains_is_restarted(make_generator):
    class Dying(ServerLike):
        is_dead = False

        def collect(self, timeout_s):
            if self.is_dead:
                self.is_dead = False
                raise EngineFault("it died.")
            return super().collect(timeout_s)

    engine = Dying()
    run = Run(make_generator(engine))
    run.take()
    engine.is_dead = True
    for _ in range(3):
        run.take()
    assert run.generator.driver.pop_metrics()["rollout/restarts"] == 1
    run.source.close()


class Stuck(ServerLike):
    """Never generates for group 1, and returns its requests when they are aborted, unless it ``keeps`` them.

    Time passes for deadlines while nothing else runs, ``jump_s`` each time that nothing comes.
    """

    keeps = False
    jump_s = 200.0
    now = 0.0

    def start(self, policy, placement):
        super().start(policy, placement)
        self.held = set()

    def submit(self, requests, sampling):
        held = [request for request in requests if request.request_id.split("/")[2] == "1"]
        self.held |= {request.request_id for request in held}
        super().submit([request for request in requests if request not in held], sampling)

    def collect(self, timeout_s):
        found = super().collect(timeout_s)
        with self._lock:  # a request leaves the one and enters the other
            if self.held and not found and not self._unfinished and self._finished.empty():
                self.now += self.jump_s
        return found

    def abort(self, request_ids):
        for name in self.held & set(request_ids):
            if not self.keeps:
                self.held.remove(name)
                self._finished.put(Completion(name, [], [], "abort", self._version))
        super().abort([name for name in request_ids if name not in self.held])


@pytest.mark.filterwarnings("ignore:.*trajectories took longer", "ignore:.*restarts")
@pytest.mark.parametrize(("environment", "keeps"), [(None, False), (Counting, False), (None, True)])
def test_a_straggler_costs_its_own_trajectory(environment, keeps, make_generator, monkeypatch):
    """It catches a request that never ends and wedges the run, trains, or costs more than one restart."""
    engine, options = Stuck(), PartialRollout(asynchronous=True, max_staleness=1, trajectory_deadline_s=100.0)
    engine.keeps, engine.jump_s = keeps, 200.0 if environment is None else 2.0  # an environment may be stepping
    monkeypatch.setattr("rlplug.rollout.streaming.time", SimpleNamespace(monotonic=lambda: engine.now))
    run = Run(make_generator(engine, environment, TURNS), options)
    for _ in range(3):
        run.take()
    assert run.source.pop_metrics()["rollout/restarts"] == keeps
    run.source.close()
    failed = [sample for sample in run.samples if sample.errors]
    assert [sample.prompt.uid for sample in failed] == ["1", "1"]
    (error,) = failed[0].errors.values()
    assert error.message == "took longer than model.partial_rollout.trajectory_deadline_s (100 s)"
    batch = StepBatch.from_samples(run.samples)
    assert run.state.metrics(batch, version=4)["partial/timed_out"] == 2


def test_an_engine_that_hangs_in_a_call_ends_the_run(make_generator, monkeypatch):
    monkeypatch.setattr("rlplug_async.asynchronous.HUNG_S", 0.5)
    is_free = threading.Event()

    class Hung(ServerLike):
        def collect(self, timeout_s):
            is_free.wait(20)
            return super().collect(timeout_s)

    run = Run(make_generator(Hung()))
    with pytest.raises(RunError, match="Hung has not returned from submit, collect or abort"):
        run.take()
    is_free.set()
    run.source.close()


def test_what_the_thread_raises_ends_the_run(make_generator):
    class Broken(ServerLike):
        def collect(self, timeout_s):
            raise ZeroDivisionError("a bug")

    run = Run(make_generator(Broken()))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run.take()
    run.source.close()


def test_an_engine_that_keeps_aborted_requests_is_named(monkeypatch):
    monkeypatch.setattr("rlplug_async.background.PAUSE_S", 0.1)
    is_free = threading.Event()
    generation = BackgroundGeneration(lambda engine: is_free.wait(20), ServerLike(), threading.Event())
    with pytest.raises(RunError, match="ServerLike did not return the tokens of aborted requests"):
        generation.pause()
    is_free.set()
    generation.pause()
    assert not generation.is_running


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_step": 4}, "has asynchronous and max_tokens_per_step"),
        ({"over_provisioning": 2.5, "max_staleness": 1}, "at most 2, which is max_staleness and 1"),
        ({"over_provisioning": 1.5, "max_staleness": 0}, "max_staleness is 0, and over_provisioning has groups train"),
        ({"max_staleness": -1}, "max_staleness is -1: give a number from 0 up to 1,000"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_options(PartialRollout(asynchronous=True, **options))


@pytest.mark.parametrize(("engine", "capability"), [(HFRollout, "streaming"), (CapableRollout, "disaggregated")])
def test_engines_that_cannot_are_refused_by_name(engine, capability):
    algorithm = GRPO(correction=Correction())
    with pytest.raises(ConfigError, match=rf"asynchronous needs.*'{capability}', which {engine.__name__} lacks"):
        check_partial_rollout(OPTIONS, 12, algorithm, engine(), [HFRollout, ServerLike])


def test_tokens_of_former_policies_need_a_correction_and_a_streamed_step_has_none():
    engines = [HFRollout, ServerLike]
    check_partial_rollout(PartialRollout(asynchronous=True, max_staleness=0), 12, GRPO(), ServerLike(), engines)
    with pytest.raises(ConfigError, match="GRPO does not correct for that"):
        check_partial_rollout(OPTIONS, 12, GRPO(), ServerLike(), engines)


@pytest.mark.parametrize("first", [0, 100, 200, 300])
def test_asynchronous_runs_on_a_virtual_clock(first):
    """Lengths, rates, bounds, faults and kills at random, with the real producer: see ``World``."""
    covered: dict[str, int] = {}
    for seed in range(first, first + 25):
        for name, value in run_case(seed).items():
            covered[name] = covered.get(name, 0) + value
    assert all(covered.values()), covered
