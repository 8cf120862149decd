"""An engine with given rates, its driver and its producer's thread, on a virtual clock of two threads."""

from __future__ import annotations

import contextlib
import math
import random
import threading

import torch
from rlplug_async import asynchronous

from rlplug.interfaces.rollout import EngineCapabilities, EngineFault, Placement, PolicySpec, RolloutEngine
from rlplug.types import Completion

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

    def __init__(
        self,
        clock: VirtualClock,
        rng: random.Random,
        *,
        rate: float,
        spread: float,
        fault_share: float,
        stuck_share: float,
    ) -> None:
        self.clock, self.rng, self.rate = clock, rng, rate
        self.fault_share, self.spread, self.stuck_share = fault_share, spread, stuck_share
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
        self.engine, self.fault = engine, None
        self.placement = Placement(torch.device("cpu"), 0, 1)
        self.spec = PolicySpec("virtual", torch.float32, (), 0, MOST_TOKENS + 1)

    def ready_engine(self, version):
        if self.fault is not None:
            raise self.fault
        if self.engine.version != version:
            self.engine.update_weights((), version)
        return contextlib.nullcontext(self.engine)

    def sync_weights(self, version) -> None:
        self.with_restarts(lambda: self.ready_engine(version))

    def note_fault(self, fault) -> None:
        self.fault = fault or self.fault

    def with_restarts(self, attempt, num_missing=None, pause=lambda: None) -> None:
        while True:
            try:
                return attempt()
            except EngineFault:
                pause()
                self.fault = None
                self.engine.close()
                self.engine.version = -1

    def finish(self) -> None:
        pass

    def restore_trainer(self) -> None:
        pass

    def close(self) -> None:
        self.engine.close()
