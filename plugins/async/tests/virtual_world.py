"""An asynchronous run on a virtual clock: real queue, state, agent loop and producer; an engine with given rates.

    python plugins/async/tests/virtual_world.py 100000 --processes 8

runs as many cases, each from its own seed, and prints what they covered.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from unittest import mock

from group_queue_cases import run_cases
from rlplug_async import asynchronous, enough_groups
from rlplug_async.asynchronous import AsynchronousSource
from virtual_engine import MOST_TOKENS, Killed, VirtualClock, VirtualDriver, VirtualEngine, VirtualGeneration, token_of

from rlplug.rollout import streaming
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.source import RolloutGenerator, RolloutRequest
from rlplug.rollout.trajectory import Trajectory
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.types import Prompt, SamplingParams


def prompt(number: int) -> Prompt:
    return Prompt(str(number), (1,), "")


class VirtualGenerator(RolloutGenerator):
    """Returns groups of trajectories as they are, without a tokenizer."""

    def __init__(self, driver: VirtualDriver) -> None:
        super().__init__(driver, None, lambda: TurnRules(TurnOptions()))

    def share_of_rank(self, groups):
        return groups


class World:
    """A run that is killed and resumed at times, and what must hold of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.per_step, self.num_samples = rng.randint(1, 3), rng.randint(1, 2)
        self.bound = rng.choice([0, 0, 1, 2, 3, 4])
        ratio = rng.choice([None, rng.uniform(1.01, self.bound + 1)]) if self.bound else None
        self.stuck_share = rng.choice([0.0, 0.0, 0.1, 1.0])
        deadline_s = rng.choice([1.0, 5.0]) if self.stuck_share else rng.choice([None, None, 0.5])
        self.options = PartialRollout(
            asynchronous=True, over_provisioning=ratio, max_staleness=self.bound, trajectory_deadline_s=deadline_s
        )
        self.rate, self.spread = rng.choice([3.0, 10.0, 100.0]), rng.choice([1.0, 3.0, 8.0])
        self.update_s, self.fault_share = rng.choice([0.0, 0.1, 1.0, 3.0]), rng.choice([0.0, 0.0, 0.02, 0.2])
        self.poll_s = rng.choice([0.05, 0.4])
        self.save_every, self.reject_share = rng.randint(1, 3), rng.choice([0.0, 0.0, 0.3])
        self.num_steps = rng.randint(1, 6)
        self.num_kills = rng.choice([0, 0, 1, 3])
        self.validate_every = rng.choice([0, 1, 2, 3]) if self.bound else 0
        self.num_held_out = rng.randint(1, 4)
        names = ("kills", "faults", "staleness", "groups", "cut", "late", "parts", "validations", "left out")
        self.stats = dict.fromkeys(names, 0)
        self.checkpoint = {"step": 0, "drawn": 0, "trained": [], "validated": [], "state": None}

    def run(self) -> dict[str, int]:
        while not self.run_until_killed():
            self.stats["kills"] += 1
        return self.stats

    def run_until_killed(self) -> bool:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))  # of late trajectories
            clock = self.new_clock()
            for module in (asynchronous, streaming, enough_groups):
                stack.enter_context(mock.patch.object(module, "time", clock))
            stack.enter_context(mock.patch.object(asynchronous, "BackgroundGeneration", VirtualGeneration))
            stack.enter_context(mock.patch.object(asynchronous, "rank_zero_info"))
            stack.enter_context(mock.patch.object(streaming, "COLLECT_BRIEFLY_S", self.poll_s))
            stack.enter_context(mock.patch.object(asynchronous, "POLL_S", self.poll_s))
            return self.run_on(clock)

    def new_clock(self) -> VirtualClock:
        rng, kill_at = self.rng, float("inf")
        if self.num_kills > 0:
            self.num_kills -= 1
            kill_at = rng.uniform(0.0, 3 * (self.update_s + 1.0 + 10 / self.rate))
        return VirtualClock(kill_at)

    def run_on(self, clock: VirtualClock) -> bool:
        VirtualGeneration.clock = clock
        engine = VirtualEngine(
            clock,
            self.rng,
            rate=self.rate,
            spread=self.spread,
            fault_share=self.fault_share,
            stuck_share=self.stuck_share,
        )
        source = AsynchronousSource(self.options, self.per_step)
        source.start(VirtualGenerator(VirtualDriver(engine)))
        try:
            self.train(clock, source)
        except Killed:
            clock.kill()
            return False
        finally:
            self.stats["faults"] += engine.num_faults
            num_held_out = self.num_held_out if self.validate_every else 0
            assert engine.most_running <= (self.bound + 1) * self.per_step * self.num_samples + num_held_out
        clock.kill_at = float("inf")
        source.close()
        return True

    def train(self, clock: VirtualClock, source: AsynchronousSource) -> None:
        saved = self.checkpoint
        if saved["state"] is not None:
            prompts = {str(n): prompt(n) for n in range(saved["drawn"])}
            source.load_state_dict(saved["state"], prompts, saved["step"], MOST_TOKENS, TurnOptions())
            assert source.state_dict(list).keys() == saved["state"].keys()
            assert source.queue.state_dict() == saved["state"]["queue"]
        drawn, trained, validated = saved["drawn"], list(saved["trained"]), list(saved["validated"])
        for step in range(saved["step"], self.num_steps):
            source.begin_step(step + 1)
            self.begin_validation(source, step)
            num_missing = self.per_step
            while num_missing:
                num_new = source.num_prompts_wanted(num_missing, 1.0)
                prompts = [prompt(drawn + index) for index in range(num_new)]
                drawn += num_new
                assert len(source.queue.open) + num_new <= (self.bound + 1) * self.per_step
                births = {source.trajectories[n][0].prompt.uid: group.version for n, group in source.queue.open.items()}
                births |= {each.uid: step for each in prompts}
                source.sync_weights(step)
                request = RolloutRequest(prompts, self.num_samples, SamplingParams(MOST_TOKENS), f"0/{step}", step)
                groups = source.next_groups(request, num_missing, 0)
                assert len(groups) == num_missing or (self.bound == 0 and groups)
                self.stats["parts"] += len(groups) < num_missing
                for group in groups:
                    self.check(group, births[group[0].prompt.uid], step)
                    trained.append(int(group[0].prompt.uid))
                num_missing -= sum(self.rng.random() >= self.reject_share for _ in groups)
            assert sorted(trained + [int(t[0].prompt.uid) for t in source.trajectories.values()]) == list(range(drawn))
            clock.sleep(self.update_s)
            if source.has_held_out:
                self.finish_validation(source, step)
                validated.append(step)
            if (step + 1) % self.save_every == 0:
                source.pause()
                plain = source.state_dict(list)
                self.checkpoint = {"step": step + 1, "drawn": drawn, "trained": list(trained), "state": plain}
                self.checkpoint["validated"] = list(validated)
        assert validated == [step for step in range(self.num_steps) if self.is_due(step)]

    def is_due(self, step: int) -> bool:
        return self.validate_every > 0 and step % self.validate_every == 0

    def begin_validation(self, source: AsynchronousSource, step: int) -> None:
        if self.is_due(step):
            prompts = [prompt(number) for number in range(self.num_held_out)]
            greedy = SamplingParams(MOST_TOKENS, temperature=0.0)
            source.begin_held_out(RolloutRequest(prompts, 1, greedy, f"validate/{step}", step))

    def finish_validation(self, source: AsynchronousSource, step: int) -> None:
        """All tokens are of the weights with which it began, though the policy has newer ones by now."""
        groups = source.finish_held_out(1)
        if groups is None:
            self.stats["left out"] += 1
            return
        self.stats["validations"] += 1
        for trajectory in itertools.chain(*groups):
            assert trajectory.finish_reason is not None
            self.check_tokens(trajectory)
            assert {segment.policy_version for segment in trajectory.segments} <= {step}

    def check(self, group, born: int, step: int) -> None:
        assert 0 <= step - born <= self.bound
        self.stats["staleness"] = max(self.stats["staleness"], step - born)
        self.stats["groups"] += 1
        assert len(group) == self.num_samples
        for trajectory in group:
            self.check_tokens(trajectory)
            if not trajectory.error:
                versions = [segment.policy_version for segment in trajectory.segments]
                assert versions == sorted(versions)
                assert born <= versions[0]
                assert versions[-1] <= step
                self.stats["cut"] += len(versions) > 1

    def check_tokens(self, trajectory: Trajectory) -> None:
        """It has every token once, or ended at its deadline."""
        tokens = trajectory.token_ids[1:].tolist()
        assert tokens == [token_of(trajectory.key, index) for index in range(len(tokens))]
        if trajectory.error:
            assert trajectory.is_late
            assert self.options.trajectory_deadline_s < trajectory.seconds
            self.stats["late"] += 1
            return
        assert trajectory.finish_reason == "stop"
        assert sum(segment.end - segment.start for segment in trajectory.segments) == len(tokens)


def run_case(seed: int) -> dict[str, int]:
    return World(random.Random(seed)).run()


if __name__ == "__main__":
    run_cases(run_case)
