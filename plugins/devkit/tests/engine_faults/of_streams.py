"""Faults of engines that stream."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from engine_faults.faults import Capable, fault
from rlplug.interfaces import Placement, PolicySpec
from rlplug.types import Completion, Request, SamplingParams

STREAM = "streaming"


@fault(STREAM, "test_streamed_requests_keep_their_own_sampling")
class StreamsWithTheNewestSampling(Capable):
    """Samples all running requests as the newest was asked for."""

    def submit(self, requests, sampling):
        self._newest = sampling
        super().submit(requests, sampling)

    def _run(self, request, sampling):
        time.sleep(0.1)
        newest = dataclasses.replace(self._newest, max_new_tokens=sampling.max_new_tokens)
        super()._run(request, newest)


@fault(STREAM, "test_streamed_requests_keep_their_own_limits")
class StreamsWithoutLimitsOfRequests(Capable):
    """Ignores limits of single requests when it streams."""

    def submit(self, requests, sampling):
        super().submit([dataclasses.replace(r, max_new_tokens=None) for r in requests], sampling)


@fault(STREAM, "test_submitted_requests_come_back_once")
class StreamsTheFirstVersion(Capable):
    """Stamps streamed completions with version 1."""

    def collect(self, timeout_s):
        return [dataclasses.replace(c, policy_version=1) for c in super().collect(timeout_s)]


@fault(STREAM, "test_prompt_beyond_the_context_is_refused_when_it_is_submitted")
class SwallowsLongPrompts(Capable):
    """Loses submitted prompts that are beyond the context."""

    def submit(self, requests, sampling):
        super().submit([r for r in requests if len(r.prompt_ids) < self._policy.max_context], sampling)


@fault(STREAM, "test_abort_returns_what_there_is")
class AbortsEverything(Capable):
    """Aborts all requests when one is to be aborted."""

    def abort(self, request_ids):
        super().abort(list(self._unfinished))


@fault(STREAM, "test_abort_of_what_is_done_changes_nothing")
class AbortsWhatIsReady(Capable):
    """Returns once more, as aborted, what was ready and not collected."""

    def abort(self, request_ids):
        for completion in [self._finished.get() for _ in range(self._finished.qsize())]:
            self._finished.put(completion)
            if completion.request_id in request_ids:
                self._finished.put(dataclasses.replace(completion, finish_reason="abort"))
        super().abort(request_ids)


@fault(STREAM, "test_abort_returns_what_waits_too")
class ForgetsWhatWaits(Capable):
    """Loses aborted requests that have not begun."""

    def _run(self, request: Request, sampling: SamplingParams) -> None:
        if request.request_id in self._aborted.request_ids:
            with self._lock:
                self._unfinished.discard(request.request_id)
        else:
            super()._run(request, sampling)


@fault(STREAM, "test_abort_returns_what_waits_too")
class StopsTheSameNameAgain(Capable):
    """Stops a request whose name was aborted once, whenever it comes."""

    def collect(self, timeout_s):
        found = super().collect(timeout_s)
        self._aborted.request_ids |= {each.request_id for each in found if each.finish_reason == "abort"}
        return found


@fault(STREAM, "test_collect_returns_what_is_ready_at_once")
class CollectsUntilItsTimeIsOver(Capable):
    """Collects until the time limit is over, also when something is ready."""

    def collect(self, timeout_s: float) -> list[Completion]:
        ends_at = time.monotonic() + timeout_s
        found: list[Completion] = []
        while time.monotonic() < ends_at:
            found += super().collect(min(0.05, timeout_s))
        return found


@fault(STREAM, "test_abort_stops_only_what_has_its_name")
class AbortsByTheirBeginning(Capable):
    """Aborts all requests whose names begin with the given one."""

    def abort(self, request_ids: Sequence[str]) -> None:
        super().abort([name for name in self._unfinished if name.startswith(tuple(request_ids))])


@fault(STREAM, "test_a_start_forgets_what_ran_before", "submitted before close")
class HandsOutFormerCompletions(Capable):
    """Keeps its queue of completions when it starts again."""

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        former = self.__dict__.get("_finished")
        super().start(policy, placement)
        self._finished = self._finished if former is None else former


@fault(STREAM, "test_drawn_streams_are_answered")
class StreamsEqualPromptsAlike(Capable):
    """Gives requests of one call with equal prompts the limit of the first."""

    def submit(self, requests, sampling):
        super().submit(with_equal_limits(requests), sampling)


def with_equal_limits(requests: Sequence[Request]) -> list[Request]:
    """Return requests, those of equal prompts with the limit of the first."""
    first: dict[tuple[int, ...], Request] = {}
    own = [first.setdefault(request.prompt_ids, request) for request in requests]
    return [dataclasses.replace(r, max_new_tokens=o.max_new_tokens) for r, o in zip(requests, own, strict=True)]
