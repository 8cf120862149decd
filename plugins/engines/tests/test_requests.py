"""Requests that run in an engine: order, names, deadlines, what a fault keeps, and what is counted."""

from __future__ import annotations

import threading
import time

import pytest
from counting_engine import CONTEXT, DIES, FAILS, HANGS, REFUSED, Answer, CountingRequests
from rlplug_engines.colocated import requests as requests_module

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault
from rlplug.types import Request, SamplingParams

SAMPLING = SamplingParams(20)


@pytest.fixture
def requests() -> CountingRequests:
    requests = CountingRequests()
    requests.version = 4
    return requests


def asked(name: str, *lengths: int, first: int = 10) -> list[Request]:
    return [Request(f"{name}/{i}", (first, i), seed=i, max_new_tokens=length) for i, length in enumerate(lengths)]


def test_completions_come_in_the_order_of_requests(requests: CountingRequests) -> None:
    completions = requests.generate(asked("a", 30, 1, 9), SAMPLING)
    assert [c.request_id for c in completions] == ["a/0", "a/1", "a/2"]
    assert [len(c.token_ids) for c in completions] == [20, 1, 9]
    assert {c.policy_version for c in completions} == {4}
    assert requests.generate([], SAMPLING) == []


def test_context_cuts_completions_short_and_refuses_prompts_that_fill_it(requests: CountingRequests) -> None:
    long = Request("long", tuple(range(10, 10 + CONTEXT - 3)), seed=1)
    assert len(requests.generate([long], SAMPLING)[0].token_ids) == 3
    too_long = Request("too long", tuple(range(CONTEXT)), seed=1)
    with pytest.raises(RunError, match=r"request too long: .*raise rollout\.context_length"):
        requests.submit([*asked("a", 3), too_long], SAMPLING)
    assert len(requests.names) == 1, "nothing of them was started"


def test_names_differ_also_of_requests_that_come_again(requests: CountingRequests) -> None:
    for _ in range(3):
        requests.generate(asked("a", 1, 1), SAMPLING)
    assert len(set(requests.names)) == 6
    assert len({len(name) for name in requests.names}) == 1


def test_submitted_requests_run_beside_those_of_generate_and_come_back_once(requests: CountingRequests) -> None:
    parts = [asked(f"thread {index}", 5, 6) for index in range(4)]
    threads = [threading.Thread(target=requests.submit, args=(part, SAMPLING)) for part in parts]
    for thread in threads:
        thread.start()
    assert len(requests.generate(asked("a", 20), SAMPLING)) == 1
    for thread in threads:
        thread.join()
    collected: list[str] = []
    while len(collected) < 8:
        collected += [completion.request_id for completion in requests.collect(5.0)]
    assert sorted(collected) == sorted(request.request_id for part in parts for request in part)
    assert requests.collect(0.0) == []
    assert requests.num_running == 0


def test_collect_waits_for_the_first_and_no_longer_than_its_time(requests: CountingRequests) -> None:
    requests.submit(asked("a", 5, first=HANGS), SAMPLING)
    began = time.monotonic()
    assert requests.collect(0.2) == []
    assert 0.15 < time.monotonic() - began < 5
    threading.Timer(0.2, requests.submit, (asked("b", 2), SAMPLING)).start()
    assert [completion.request_id for completion in requests.collect(30.0)] == ["b/0"]
    assert time.monotonic() - began < 20


def test_abort_stops_submitted_requests_alone(requests: CountingRequests) -> None:
    requests.submit(asked("a", 5, 5, first=HANGS), SAMPLING)
    requests.abort(["a/1", "never"])
    (aborted,) = requests.collect(5.0)
    assert (aborted.request_id, aborted.finish_reason, aborted.token_ids.tolist()) == ("a/1", "abort", [0])
    requests.abort(["a/1"])
    assert requests.collect(0.0) == []
    assert requests.num_running == 1


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_fault_keeps_what_is_done(requests: CountingRequests) -> None:
    mixed = [*asked("bad", 2, first=FAILS), *asked("a", 2, 3)]
    with pytest.raises(
        EngineFault, match=r"^Counter has 2 of 3 completions and failed: request bad/0 failed\.$"
    ) as fault:
        requests.generate(mixed, SAMPLING)
    assert {completion.request_id for completion in fault.value.completions} == {"a/0", "a/1"}
    requests.submit(mixed, SAMPLING)
    with pytest.raises(EngineFault, match="request bad/0 failed") as fault:
        requests.collect(5.0)
    assert {completion.request_id for completion in fault.value.completions} == {"a/0", "a/1"}


def test_fault_of_a_later_answer_keeps_what_came_before(requests: CountingRequests) -> None:
    requests.submit(asked("a", 2), SAMPLING)
    requests.take(5.0)
    requests.submit(asked("bad", 2, first=DIES), SAMPLING)
    with pytest.raises(EngineFault, match=r"has 1 of 2 completions and failed: it died\.") as fault:
        requests.collect(5.0)
    assert [completion.request_id for completion in fault.value.completions] == ["a/0"]


def test_completion_of_no_use_is_no_fault(requests: CountingRequests) -> None:
    with pytest.raises(RunError, match="bad/0 is of no use") as problem:
        requests.generate(asked("bad", 2, first=REFUSED), SAMPLING)
    assert not isinstance(problem.value, EngineFault)
    assert len(requests.generate(asked("a", 2), SAMPLING)) == 1


def test_deadline_is_a_fault(requests: CountingRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "WAIT_S", 0.05)
    requests.deadline_s = 0.3
    with pytest.raises(EngineFault, match=r"1 of 2 completions.*rollout\.generate_deadline_s 0\.3\.") as fault:
        requests.generate([*asked("a", 1), *asked("endless", 1, first=HANGS)], SAMPLING)
    assert [completion.request_id for completion in fault.value.completions] == ["a/0"]


def test_deadline_holds_for_a_submitted_request(requests: CountingRequests) -> None:
    requests.seconds = 100.0
    requests.submit(asked("endless", 1, first=HANGS), SAMPLING)
    requests.seconds = 159.0
    assert requests.collect(0.0) == []
    requests.seconds = 161.0
    with pytest.raises(EngineFault, match=r"0 of 1 completions.*rollout\.generate_deadline_s 60\."):
        requests.collect(0.0)


# ---- what is counted ------------------------------------------------------------------------------------------------


def test_tokens_are_counted_over_the_time_in_which_requests_ran(requests: CountingRequests) -> None:
    requests.seconds = 10.0
    requests.submit(asked("a", 6, 4), SAMPLING)
    requests.seconds = 15.0
    assert len(requests.collect(1.0)) == 2
    requests.seconds = 100.0
    requests.submit(asked("b", 10), SAMPLING)
    requests.seconds = 105.0
    assert len(requests.collect(1.0)) == 1
    metrics = requests.stats.drain()
    assert (metrics["num_tokens"], metrics["tokens_per_s"]) == (20, 2.0)


def test_a_running_call_says_how_far_it_is(requests: CountingRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a long rollout whose progress stands still until its last completion has come."""
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(requests_module, "WAIT_S", 0.01)
    monkeypatch.setattr(requests_module.PHASE_PROGRESS, "in_call", lambda *numbers: counted.append(numbers))
    monkeypatch.setattr(requests, "poll", lambda timeout_s: [(next(iter(requests._running)), Answer(3, 10))])
    requests.generate(asked("a", 3, 3, 3, 3), SAMPLING)
    assert counted == [(1, 3), (2, 6), (3, 9), (4, 12)]
