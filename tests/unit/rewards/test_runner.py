"""The rewards phase: concurrency, deadlines, and what is no number."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from rlplug_rewards.text import ExactMatch

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces.reward import Reward
from rlplug.rewards import FunctionReward, RewardRunner
from rlplug.timeouts import waiting
from rlplug.types import RewardError
from rlplug.types.ranges import reaches

ALONE = SimpleNamespace(gather=list, gather_arrays=lambda array: array)
"""The only rank of a run."""


def runner_of(*functions, **options):
    return RewardRunner([FunctionReward(function) for function in functions], **options)


def message_of(sample):
    (error,) = sample.errors.values()
    return error.message


class Batched(Reward):
    """Answers with ``values``, whatever the samples are."""

    def __init__(self, values, batch_size):
        super().__init__()
        self.values = values
        self.batch_size = batch_size

    def score(self, samples):
        return self.values


def length(completion):
    return len(completion)


def test_reward_is_the_weighted_sum(make_sample):
    runner = RewardRunner([FunctionReward(length, weight=0.5), ExactMatch(weight=-2.0)])
    first, second = runner.score([make_sample("4"), make_sample("44")])
    assert dict(first.rewards) == {"length": 1.0, "exactmatch": 1.0}
    assert (first.reward, second.reward) == (-1.5, 1.0)
    assert (first.completion, second.completion) == ("4", "44")
    assert list(first.rewards) == ["length", "exactmatch"]


def test_no_samples():
    assert runner_of(length).score([]) == []


@pytest.mark.parametrize("value", [True, 1, 1.0, numpy.float32(1), numpy.int64(1), numpy.bool_(True), torch.tensor(1)])
def test_numbers_of_all_kinds(make_sample, value):
    (sample,) = runner_of(lambda completion: value).score([make_sample()])
    assert sample.reward == 1.0
    assert type(sample.rewards["lambda"]) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "returned nan, which is not finite"),
        (-math.inf, "returned -inf, which is not finite"),
        (torch.tensor(math.nan), "returned nan, which is not finite"),
        ("1.0", "returned str '1.0', which is not a number"),
        (None, "returned NoneType None, which is not a number"),
        (1j, "returned complex 1j, which is not a number"),
        (10**400, "which is not a number: OverflowError: int too large"),
        (torch.zeros(2), "which is not a number"),
        (RewardError("the judge is away"), "the judge is away"),
    ],
)
def test_what_is_no_number_is_an_error(make_sample, value, message):
    bad, good = runner_of(lambda completion: value if completion == "bad" else 1.0).score(
        [make_sample("bad"), make_sample("good")]
    )
    assert message in message_of(bad)
    assert math.isnan(bad.reward)
    assert good.reward == 1.0


def test_an_exception_is_an_error_that_names_the_line(make_sample):
    def divide(completion):
        return 1 / int(completion)

    samples = runner_of(divide, length).score([make_sample("0"), make_sample("2"), make_sample("x")])
    line = divide.__code__.co_firstlineno + 1
    assert message_of(samples[0]) == f"ZeroDivisionError: division by zero (at test_runner.py:{line})"
    assert message_of(samples[2]).startswith("ValueError: invalid literal")
    assert samples[0].rewards["length"] == 1.0
    assert samples[1].reward == 1.5


def test_a_system_exit_is_an_error(make_sample):
    async def leave(completion):
        sys.exit(completion)

    samples = runner_of(lambda completion: sys.exit(completion), leave).score([make_sample("bye")] * 3)
    assert {error.message.split(" (")[0] for s in samples for error in s.errors.values()} == {"SystemExit: bye"}
    assert all(len(sample.errors) == 2 for sample in samples)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 values for 2 samples"),
        ([1.0, 2.0, 3.0], "returned more than 2 values for 2 samples"),
        (1.0, "returned float 1.0, not a list of numbers"),
        (None, "returned NoneType None, not a list of numbers"),
        ("12", "returned str '12', not a list of numbers"),
    ],
)
def test_a_result_of_the_wrong_shape_is_an_error(make_sample, values, message):
    samples = RewardRunner([Batched(values, batch_size=2)]).score([make_sample()] * 2)
    assert [message_of(sample) for sample in samples] == [message] * 2


def test_batches_come_back_in_order(make_sample):
    class Lengths(Reward):
        batch_size = 3

        def score(self, samples):
            assert len(samples) <= 3
            return torch.tensor([float(len(sample.completion)) for sample in samples])

    samples = RewardRunner([Lengths()]).score([make_sample("a" * n) for n in range(7)])
    assert [sample.reward for sample in samples] == list(range(7))


def test_a_hanging_call_times_out_alone(make_sample):
    def hang(completion):
        if completion == "hang":
            time.sleep(60)
        return 1.0

    runner = runner_of(hang, deadline_s=0.2, max_concurrency=1)
    start = time.perf_counter()
    samples = runner.score([make_sample("hang"), *[make_sample("fine")] * 20, make_sample("hang")])
    assert time.perf_counter() - start < 5
    assert message_of(samples[0]) == message_of(samples[-1]) == "took longer than 0.2 s"
    assert [sample.reward for sample in samples[1:-1]] == [1.0] * 20
    assert runner.stats() == {"reward/timed_out_threads": 2.0}


def test_a_late_result_is_dropped_and_its_thread_ends(make_sample):
    release = threading.Event()

    def wait(completion):
        release.wait(60)
        return 1.0

    runner = runner_of(wait, deadline_s=0.1)
    (sample,) = runner.score([make_sample()])
    assert runner.stats()["reward/timed_out_threads"] == 1
    release.set()
    deadline = time.monotonic() + 5
    while runner.stats()["reward/timed_out_threads"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert runner.stats()["reward/timed_out_threads"] == 0
    assert message_of(sample) == "took longer than 0.1 s"


def test_the_deadline_counts_from_the_start_of_a_call(make_sample):
    def slow(completion):
        time.sleep(0.1)
        return 1.0

    start = time.perf_counter()
    samples = runner_of(slow, deadline_s=0.8, max_concurrency=1).score([make_sample()] * 12)
    assert time.perf_counter() - start > 0.8
    assert not any(sample.errors for sample in samples)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_for_a_place_counts_in_no_deadline(make_sample, is_async):
    """Alone catches a clock that runs while a call waits for its turn: of five, the last ones failed."""
    places, slots = threading.Semaphore(1), asyncio.Semaphore(1)

    def in_turn(completion: str) -> float:
        with waiting():
            places.acquire()
        time.sleep(0.7)
        places.release()
        return 1.0

    async def in_turn_async(completion: str) -> float:
        with waiting():
            await slots.acquire()
        await asyncio.sleep(0.7)
        slots.release()
        return 1.0

    runner = RewardRunner([FunctionReward(in_turn_async if is_async else in_turn)], deadline_s=2.0)
    assert [sample.reward for sample in runner.score([make_sample() for _ in range(5)])] == [1.0] * 5


def test_a_reward_that_holds_few_calls_keeps_no_other_waiting(make_sample):
    """Alone catches calls of one reward that hold all threads while they wait for their turn, and more at once."""
    running: list[int] = []
    most = 0
    others_are_done = threading.Event()

    def slow(sample):
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        assert others_are_done.wait(60)
        running.pop()
        return 1.0

    scored: list[int] = []

    def quick(sample):
        scored.append(1)
        if len(scored) == 16:
            others_are_done.set()
        return 1.0

    runner = RewardRunner([FunctionReward(slow, max_calls=2), FunctionReward(quick)], max_concurrency=8)
    assert not any(sample.errors for sample in runner.score([make_sample() for _ in range(16)]))
    assert most == 2


@pytest.mark.parametrize("is_async", [False, True])
def test_samples_and_rewards_run_side_by_side(make_sample, is_async):
    running = []
    most = 0

    def begin():
        nonlocal most
        running.append(1)
        most = max(most, len(running))

    def wait(completion):
        begin()
        time.sleep(0.05)
        running.pop()
        return 1.0

    async def wait_async(completion):
        begin()
        await asyncio.sleep(0.05)
        running.pop()
        return 1.0

    functions = [wait_async] if is_async else [wait]
    samples = runner_of(*functions).score([make_sample()] * 32)
    assert most > 4
    assert all(sample.reward == 1.0 for sample in samples)


def test_async_rewards_share_one_loop_and_keep_to_max_concurrency(make_sample):
    loops, running, most = set(), 0, 0

    async def score(completion):
        nonlocal running, most
        loops.add(id(asyncio.get_running_loop()))
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return 1.0

    runner = runner_of(score, max_concurrency=4)
    for _ in range(2):
        assert all(sample.reward == 1.0 for sample in runner.score([make_sample()] * 12))
    assert most == 4
    assert len(loops) == 1


def test_async_errors_and_timeouts(make_sample):
    async def score(completion):
        if completion == "raise":
            raise ValueError("bad judge")
        if completion == "hang":
            await asyncio.sleep(60)
        while completion == "stubborn":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return 1.0

    runner = runner_of(score, deadline_s=0.2)
    samples = runner.score([make_sample(name) for name in ("raise", "hang", "stubborn", "fine")])
    assert message_of(samples[0]).startswith("ValueError: bad judge (at test_runner.py:")
    assert message_of(samples[1]) == message_of(samples[2]) == "took longer than 0.2 s"
    assert samples[3].reward == 1.0
    assert runner.stats()["reward/timed_out_threads"] == 0


def test_an_async_reward_that_blocks_the_loop(make_sample, recwarn):
    """Its end also catches coroutines that are dropped with the loop, of which Python warns."""
    is_over = threading.Event()

    async def score(completion):
        if completion == "block":
            is_over.wait(60)
        await asyncio.sleep(0.01)
        return 1.0

    runner = runner_of(score, length, deadline_s=0.3, max_concurrency=4)
    start = time.perf_counter()
    samples = runner.score([make_sample("block"), *[make_sample("fine")] * 10])
    assert time.perf_counter() - start < 5
    assert "an async function blocks" in samples[0].errors["score"].message
    assert all("length" not in sample.errors for sample in samples)
    assert runner.stats()["reward/timed_out_threads"] == 1
    assert all(sample.reward == 5.0 for sample in runner.score([make_sample("fine")] * 10))
    is_over.set()
    while runner.stats()["reward/timed_out_threads"]:
        time.sleep(0.01)
    gc.collect()
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]


@pytest.mark.nightly
def test_a_hanging_reward_does_not_keep_the_process():
    code = (
        "import time\n"
        "from rlplug.rewards import FunctionReward, RewardRunner\n"
        "from rlplug.types import Prompt, Sample\n"
        "def hang(completion): time.sleep(600)\n"
        "async def block(completion): time.sleep(600)\n"
        "sample = Sample(Prompt('a', (1,), ''), 0, (1, 2), (False, True), (0.0, 0.0), 'b', 'stop', 0)\n"
        "(sample,) = RewardRunner([FunctionReward(hang), FunctionReward(block)], deadline_s=0.2).score([sample])\n"
        "print(len(sample.errors), flush=True)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "2", "")


def test_quick_calls_start_few_threads(make_sample):
    threads = set()

    def score(completion):
        threads.add(threading.get_ident())
        return 1.0

    runner_of(score).score([make_sample()] * 256)
    assert len(threads) <= 16


def test_check_stops_the_run_above_the_share(make_sample):
    def fail(completion):
        if completion == "bad":
            raise ValueError("no such judge")
        return 1.0

    runner = runner_of(length, fail, max_error_share=0.25)
    scored = runner.score([make_sample("good", uid=f"train.jsonl:{n}") for n in range(6)])
    scored += runner.score([make_sample("bad", uid=f"train.jsonl:{n}") for n in range(6, 9)])
    runner.check(scored[:6], ALONE)
    runner.check(scored[:8], ALONE)  # 2 of 8 are the share itself
    runner.check([], ALONE)
    with pytest.raises(RunError) as raised:
        runner.check(scored, ALONE)
    message = str(raised.value)
    assert "3 of 9 samples (33%)" in message
    assert "reward 'fail' on prompt 'train.jsonl:6': ValueError: no such judge" in message
    for key in ("model.rewards", "model.limits.max_reward_error_share", "model.limits.reward_deadline_s"):
        assert key in message


def test_decimal_shares_reach_what_they_are_a_share_of(make_sample):
    """Alone catches weights that sum to 1 but for rounding, which then pass nowhere, and 29 errors of 29%."""
    parts = [FunctionReward(length, weight=weight, name=f"part{weight}") for weight in (0.7, 0.2, 0.1)]
    (whole,) = RewardRunner(parts).score([make_sample("4")])
    assert whole.reward == 1.0
    failed = RewardRunner([ExactMatch()], max_error_share=0.29)
    failed.check(failed.score([make_sample(answer=None)] * 29 + [make_sample()] * 71), ALONE)
    assert reaches(numpy.array([sum([0.1] * 10), 1.0 - 1e-3]), 1.0).tolist() == [True, False]
    assert reaches(0.57 * 100, 57)


def test_a_share_of_zero_stops_at_the_first_error_and_one_never(make_sample):
    samples = RewardRunner([ExactMatch()]).score([make_sample(answer=None)])
    with pytest.raises(RunError, match="100%"):
        RewardRunner([ExactMatch()], max_error_share=0).check(samples, ALONE)
    RewardRunner([ExactMatch()], max_error_share=1).check(samples, ALONE)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([], {}, "model.rewards is empty"),
        ([ExactMatch(), ExactMatch()], {}, "model.rewards has 2 rewards named 'exactmatch'.*init_args.name"),
        ([ExactMatch(name="mean")], {}, "named 'mean'"),
        ([Batched([], batch_size=0)], {}, "'batched' has batch_size 0"),
    ],
)
def test_arguments_are_checked(rewards, options, message):
    with pytest.raises(ConfigError, match=message):
        RewardRunner(rewards, **options)
