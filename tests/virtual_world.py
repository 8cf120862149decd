"""An asynchronous run on a virtual clock: real ledger, state, agent loop and producer; an engine with given rates.

    python tests/virtual_world.py 100000 --processes 8

runs as many cases, each from its own seed, and prints what they covered.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import threading
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
from ledger_cases import run_cases

from rlplug.interfaces.rollout import EngineCapabilities, EngineFault, Placement, PolicySpec, RolloutEngine
from rlplug.rollout import agent_loop
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.engines.ranks import EngineRanks
from rlplug.rollout.partial import asynchronous, deadlines, enough_groups
from rlplug.rollout.partial.asynchronous import AsynchronousRollout
from rlplug.rollout.partial.enough_groups import CompleteGroups
from rlplug.rollout.partial.held_out import HeldOutRollout
from rlplug.rollout.partial.state import PartialRolloutState
from rlplug.rollout.trajectory import Trajectory, new_trajectories
from rlplug.types import Completion, Prompt, SamplingParams

MAIN, PRODUCER = 0, 1
MOST_TOKENS = 12
TOO_LATE = 1e5
"""Virtual seconds after which a run hangs."""


class Ended(BaseException):
    """Ends the producer's thread, as a kill does."""


class Killed(Exception):
    """SIGKILL in the main thread."""


class VirtualClock:
    """Time of two threads, of which only one runs at a time: the one that wakes first."""

    def __init__(self, kill_at: float) -> None:
        self.now = 0.0
        self.kill_at = kill_at
        self.is_dead = False
        self._wakes = {}
        self._turns = [threading.Lock(), threading.Lock()]
        for turn in self._turns:
            turn.acquire()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        me = PRODUCER if threading.current_thread().name == "producer" else MAIN
        self._wakes[me] = self.now + max(seconds, 0.0)
        other = min(self._wakes, key=lambda actor: (self._wakes[actor], actor == me))
        self.now = self._wakes[other]
        if other != me:
            self._turns[other].release()
            self._turns[me].acquire()
        if self.is_dead and me == PRODUCER:
            raise Ended
        assert self.now < TOO_LATE, "the run hangs"
        if me == MAIN and self.now >= self.kill_at:
            raise Killed

    def start(self, thread: threading.Thread) -> None:
        """Let the producer begin when the main thread sleeps next."""
        self._wakes[PRODUCER] = self.now
        thread.start()

    def begin(self) -> None:
        self._turns[PRODUCER].acquire()
        if self.is_dead:
            raise Ended

    def end(self) -> None:
        """End the producer: the main thread goes on when it wakes."""
        del self._wakes[PRODUCER]
        self.now = max(self.now, self._wakes[MAIN])
        self._turns[MAIN].release()

    def kill(self) -> None:
        self.is_dead = True
        if PRODUCER in self._wakes:
            self._turns[PRODUCER].release()
            self._turns[MAIN].acquire()


class VirtualGeneration:
    """Stands for ``BackgroundGeneration``, on the virtual clock."""

    clock: VirtualClock

    def __init__(self, stream, engine, is_paused) -> None:
        self._stream, self._engine, self._is_paused = stream, engine, is_paused
        self.fault = None
        self.is_running = True
        self.ended_at = 0.0
        self.error = None
        self._thread = threading.Thread(target=self._run, name="producer", daemon=True)
        self.clock.start(self._thread)

    def _run(self) -> None:
        clock = self.clock
        try:
            clock.begin()
            self._stream(self._engine)
        except EngineFault as fault:
            self.fault = fault
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001
            self.error = error
        self.is_running, self.ended_at = False, clock.now
        clock.end()

    def pause(self) -> None:
        self._is_paused.set()
        while self.is_running:
            self.clock.sleep(asynchronous.POLL_S)
        self._thread.join()
        if self.error is not None:
            raise self.error


def token_of(key: str, index: int) -> int:
    return hash((key, index)) % 1000


class VirtualEngine(RolloutEngine):
    """Decodes every request at a rate, each to its own length, and fails at times."""

    capabilities = EngineCapabilities(streaming=True, disaggregated=True)

    def __init__(self, clock: VirtualClock, world: World) -> None:
        self.clock, self.rng, self.rate = clock, world.rng, world.rate
        self.fault_share, self.spread, self.stuck_share = world.fault_share, world.spread, world.stuck_share
        self.version = -1
        self.running = {}
        self.most_running = 0
        self.num_faults = 0

    def length_of(self, key: str) -> int:
        """Return a trajectory's length: heavy-tailed, the same whenever it is asked for."""
        return min(MOST_TOKENS, 1 + int(random.Random(key).expovariate(1 / self.spread)))

    def end_of(self, key: str, left: int) -> float:
        """Return when a request that begins now ends: never, if its trajectory is stuck after its first tokens."""
        is_stuck = self.stuck_share > 0 and random.Random(f"{key}/stuck").random() < self.stuck_share
        return math.inf if is_stuck else self.clock.now + left / self.rate

    def start(self, policy, placement) -> None:
        self.running = {}

    def generate(self, requests, sampling):
        raise NotImplementedError

    def update_weights(self, buckets, version):
        assert not self.running, "requests run while weights change"
        self.version = version

    def close(self) -> None:
        self.running, self._to_abort = {}, ()

    def submit(self, requests, sampling) -> None:
        for request in requests:
            key = "/".join(request.request_id.split("/")[:4])
            assert sampling.is_greedy == key.startswith("validate/")
            done = len(request.prompt_ids) - 1
            left = self.length_of(key) - done
            end = self.end_of(key, left)
            self.running[request.request_id] = (key, done, left, self.clock.now, end, self.version)
        self.most_running = max(self.most_running, len(self.running))

    def collect(self, timeout_s):
        if self.num_faults < 3 and self.rng.random() < self.fault_share:
            self.num_faults += 1
            self.running = {}
            raise EngineFault("it died.")
        ends = [end for _, _, _, _, end, _ in self.running.values()]
        self.clock.sleep(max(0.0, min([timeout_s, *(end - self.clock.now for end in ends)])))
        found = []
        for name, (_, _, left, _, end, _) in list(self.running.items()):
            if end <= self.clock.now + 1e-9:
                found.append(self._completion(name, left, "stop"))
        return found + self._aborted()

    def abort(self, request_ids) -> None:
        self._to_abort = list(request_ids)

    _to_abort = ()

    def _aborted(self):
        names, self._to_abort = self._to_abort, ()
        found = []
        for name in names:
            if name in self.running:
                _, _, left, began, _, _ = self.running[name]
                found.append(self._completion(name, min(left - 1, int((self.clock.now - began) * self.rate)), "abort"))
        return found

    def _completion(self, name, num_tokens, reason):
        key, done, _, _, _, version = self.running.pop(name)
        tokens = [token_of(key, done + index) for index in range(num_tokens)]
        return Completion(name, tokens, [-1.0] * num_tokens, reason, version)


class VirtualDriver:
    """What the producer needs of an engine's driver."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine

    def ready_engine(self, version):
        if self.engine.version != version:
            self.engine.update_weights((), version)
        return contextlib.nullcontext(self.engine)

    def failed_on_any_rank(self, fault) -> bool:
        return fault is not None

    def end_if_stopping(self, fault, pause) -> None:
        pass

    def restart(self, fault, num_faults, num_missing) -> None:
        self.engine.close()
        self.engine.version = -1

    def finish(self) -> None:
        pass

    def restore_trainer(self) -> None:
        pass


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
        engine = VirtualEngine(clock, self)
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
