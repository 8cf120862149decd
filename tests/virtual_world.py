"""An asynchronous run on a virtual clock: real ledger, state, agent loop and producer; an engine with given rates.

    python tests/virtual_world.py 100000 --processes 8

runs as many cases, each from its own seed, and prints what they covered.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
from ledger_cases import run_cases
from virtual_engine import MOST_TOKENS, Killed, VirtualClock, VirtualDriver, VirtualEngine, VirtualGeneration, token_of

from rlplug.interfaces.rollout import Placement, PolicySpec
from rlplug.rollout import agent_loop
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.partial import asynchronous, deadlines, enough_groups
from rlplug.rollout.partial.asynchronous import AsynchronousRollout
from rlplug.rollout.partial.background import HeldOutRollout
from rlplug.rollout.partial.enough_groups import CompleteGroups
from rlplug.rollout.partial.state import PartialRolloutState
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.trajectory import Trajectory, new_trajectories
from rlplug.types import Prompt, SamplingParams


def prompt(number: int) -> Prompt:
    return Prompt(str(number), (1,), "")


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
            for module in (agent_loop, asynchronous, deadlines, enough_groups):
                stack.enter_context(mock.patch.object(module, "time", clock))
            stack.enter_context(mock.patch.object(asynchronous, "BackgroundGeneration", VirtualGeneration))
            stack.enter_context(mock.patch.object(asynchronous, "rank_zero_info"))
            stack.enter_context(mock.patch.object(agent_loop, "COLLECT_BRIEFLY_S", self.poll_s))
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
        ranks = EngineRanks(Placement(torch.device("cpu"), 0, 1), 1)
        producer = AsynchronousRollout(VirtualDriver(engine), ranks, CompleteGroups(None, 0, 1), list)
        try:
            self.train(clock, producer, ranks)
        except Killed:
            clock.kill()
            return False
        finally:
            self.stats["faults"] += engine.num_faults
            num_held_out = self.num_held_out if self.validate_every else 0
            assert engine.most_running <= (self.bound + 1) * self.per_step * self.num_samples + num_held_out
        clock.kill_at = float("inf")
        producer.close()
        return True

    def train(self, clock: VirtualClock, producer: AsynchronousRollout, ranks: EngineRanks) -> None:
        saved = self.checkpoint
        state = PartialRolloutState(self.options, self.per_step)
        if saved["state"] is not None:
            state.load_state_dict(saved["state"], {str(n): prompt(n) for n in range(saved["drawn"])})
            assert state.state_dict(list).keys() == saved["state"].keys()
            assert state.ledger.state_dict() == saved["state"]["ledger"]
        drawn, trained, validated = saved["drawn"], list(saved["trained"]), list(saved["validated"])
        for step in range(saved["step"], self.num_steps):
            producer.pause()
            self.begin_validation(producer, step)
            num_missing = self.per_step
            while num_missing:
                num_new = 0 if state.awaits_groups else state.num_wanted(num_missing)
                prompts = [prompt(drawn + index) for index in range(num_new)]
                drawn += num_new
                state.start(prompts, self.num_samples, f"0/{step}", step, ranks)
                assert len(state.ledger.open) <= (self.bound + 1) * self.per_step
                births = {state.trajectories[n][0].prompt.uid: group.version for n, group in state.ledger.open.items()}
                make_loop = functools.partial(self.loop, state, ranks, step, producer.held_out)
                groups = producer.take(state, make_loop, num_missing, step, num_new > 0)
                assert len(groups) == num_missing or (self.bound == 0 and groups)
                self.stats["parts"] += len(groups) < num_missing
                for group in groups:
                    self.check(group, births[group[0].prompt.uid], step)
                    trained.append(int(group[0].prompt.uid))
                num_missing -= sum(self.rng.random() >= self.reject_share for _ in groups)
            assert sorted(trained + [int(t[0].prompt.uid) for t in state.trajectories.values()]) == list(range(drawn))
            clock.sleep(self.update_s)
            if producer.held_out is not None:
                self.finish_validation(producer, step)
                validated.append(step)
            if (step + 1) % self.save_every == 0:
                producer.pause()
                plain = state.state_dict(list)
                self.checkpoint = {"step": step + 1, "drawn": drawn, "trained": list(trained), "state": plain}
                self.checkpoint["validated"] = list(validated)
        assert validated == [step for step in range(self.num_steps) if self.is_due(step)]

    def is_due(self, step: int) -> bool:
        return self.validate_every > 0 and step % self.validate_every == 0

    def begin_validation(self, producer: AsynchronousRollout, step: int) -> None:
        if self.is_due(step):
            prompts = [prompt(number) for number in range(self.num_held_out)]
            trajectories = new_trajectories(prompts, range(len(prompts)), 1, f"validate/{step}")
            greedy = SamplingParams(MOST_TOKENS, temperature=0.0)
            producer.held_out = HeldOutRollout(trajectories, greedy, step, len(prompts))

    def finish_validation(self, producer: AsynchronousRollout, step: int) -> None:
        """All tokens are of the weights with which it began, though the policy has newer ones by now."""
        held_out = producer.finish_held_out()
        if held_out is None:
            self.stats["left out"] += 1
            return
        self.stats["validations"] += 1
        assert not held_out.num_unfinished
        for trajectory in held_out.trajectories:
            self.check_tokens(trajectory)
            assert {segment.policy_version for segment in trajectory.segments} <= {step}

    def loop(self, state, ranks, version, held_out, is_paused) -> AgentLoop:
        return AgentLoop(
            trajectories=state.all_trajectories,
            sampling=SamplingParams(MOST_TOKENS),
            options=TurnOptions(),
            environments=None,
            observations=None,
            partial=self.options,
            is_enough=is_paused,
            held_out=held_out,
            ranks=ranks,
            policy=PolicySpec("virtual", torch.float32, (), 0, MOST_TOKENS + 1),
            version=version,
            progress=SimpleNamespace(advance=lambda *_, **__: None),
        )

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
