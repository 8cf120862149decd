"""Checks of streaming: requests are submitted, collected within a deadline, and aborted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlplug.errors import RunError
from rlplug.interfaces.rollout import RolloutEngine
from rlplug.types import Completion, Request, SamplingParams
from rlplug_devkit.claims import applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import GREEDY, Bench, num_equal

NUM_WAITING = 40
"""Requests of which most wait for others to end."""
SLACK_S = 2.0
"""Longest delay in seconds of ``collect`` on a busy machine."""


class StreamingChecks(EngineChecks):
    """Checks of ``submit``, ``collect`` and ``abort`` on an engine that is ready to generate."""

    @applies_to("streaming", is_claimed=False)
    def test_streaming_that_is_not_claimed_is_refused(self, bench: Bench) -> None:
        engine = bench.holding()
        for call in (
            lambda: engine.submit(bench.requests("refused", [3]), GREEDY),
            lambda: engine.collect(0.1),
            lambda: engine.abort(["refused/0/0"]),
        ):
            with pytest.raises(NotImplementedError, match="streaming"):
                call()

    @applies_to("streaming")
    def test_submitted_requests_come_back_once(self, bench: Bench) -> None:
        engine, requests = bench.holding(), bench.requests("streamed", [1, 70, 8], num_samples=3)
        engine.submit(requests[:4], GREEDY)
        engine.submit(requests[4:], GREEDY)
        completions = self.collect(engine, requests)
        bench.assert_greedy(requests, completions, "A streamed completion must be that of its own request_id.")
        assert {c.policy_version for c in completions} == {bench.version}, (
            f"streamed completions must carry the version {bench.version} of the last sync."
        )
        assert engine.collect(0.0) == [], "collect returned a completion twice, or one of no request."

    @applies_to("streaming")
    def test_streamed_tokens_follow_from_seeds(self, bench: Bench) -> None:
        engine, requests = bench.holding(), bench.requests("seeded stream", [4, 20], num_samples=5)
        sampling = SamplingParams(10, temperature=0.8, top_p=0.9)
        expected = bench.generate(requests, sampling)
        engine.submit(requests, sampling)
        completions = self.collect(engine, requests)
        num_same = num_equal(expected, completions, first=1)
        assert num_same >= 0.9 * len(requests), (
            f"{num_same} of {len(requests)} streamed requests gave the tokens that generate gives for the same seeds."
        )
        if bench.capabilities.logprobs:
            bench.assert_logprobs(requests, completions, sampling, "Streamed logprobs are those of generate.")

    @applies_to("streaming")
    def test_streamed_requests_keep_their_own_limits(self, bench: Bench) -> None:
        engine, limits = bench.holding("endless"), [5, None, 1, 30]
        requests = bench.limited("streamed limits", limits)
        engine.submit(requests, SamplingParams(9))
        lengths = [len(c.token_ids) for c in self.collect(engine, requests)]
        assert lengths == [5, 9, 1, 9], (
            f"streamed requests with max_new_tokens={limits} gave {lengths} tokens for SamplingParams(9)."
        )

    @applies_to("streaming")
    def test_streamed_requests_keep_their_own_sampling(self, bench: Bench) -> None:
        """Validation and training sample otherwise, and a run may submit both."""
        engine = bench.holding()
        greedy = bench.requests("own greedy", [4, 9, 30], num_samples=2)
        hot, sampling = bench.requests("own hot", [4, 9], num_samples=2), SamplingParams(8, temperature=2.0)
        engine.submit(greedy, GREEDY)
        engine.submit(hot, sampling)
        completions = self.collect(engine, [*greedy, *hot])
        advice = "A request is sampled with the SamplingParams of its own submit, whatever is submitted after it."
        bench.assert_greedy(greedy, completions[: len(greedy)], advice)
        if bench.capabilities.logprobs:
            bench.assert_logprobs(hot, completions[len(greedy) :], sampling, advice)

    @applies_to("streaming")
    def test_prompt_beyond_the_context_is_refused_when_it_is_submitted(self, bench: Bench) -> None:
        engine, requests = bench.holding(), bench.requests("too long", [3, bench.max_context])
        with pytest.raises(RunError) as refusal:  # noqa: PT012 - says what was expected
            engine.submit(requests, GREEDY)
            pytest.fail("submit accepted a prompt that fills max_context: it must raise RunError.")
        assert requests[1].request_id in str(refusal.value), f"the error must name the request: {refusal.value}"
        assert engine.collect(0.2) == [], "submit that is refused must start nothing."

    @applies_to("in_flight_update")
    def test_updates_while_requests_run(self, bench: Bench) -> None:
        engine, sampling = bench.holding("endless"), SamplingParams(200)
        requests = bench.requests("in flight", [3, 8])
        engine.submit(requests, sampling)
        early = engine.collect(0.05)
        bench.sync("endless")
        there = {completion.request_id for completion in early}
        completions = [*early, *self.collect(engine, [r for r in requests if r.request_id not in there])]
        lengths = {len(c.token_ids) for c in completions}
        assert lengths == {200}, f"requests that ran during update_weights came back with {lengths} tokens of 200."
        bench.sync("changed")
        bench.assert_holds(
            "changed", "after an update in flight", [3, 20], "All requests after it use the new weights."
        )

    @applies_to("streaming")
    def test_collect_without_requests_returns_by_its_deadline(self, bench: Bench) -> None:
        self.assert_nothing_collected(bench.holding(), "nothing was submitted")

    @applies_to("streaming")
    def test_collect_returns_by_its_deadline(self, bench: Bench) -> None:
        engine, (request,) = bench.holding("endless"), bench.requests("deadline", [3])
        engine.submit([request], self._endless(bench))
        self.assert_nothing_collected(engine, "a long request runs")
        engine.abort([request.request_id])
        self.collect(engine, [request])

    @applies_to("streaming")
    def test_collect_returns_what_is_ready_at_once(self, bench: Bench) -> None:
        """The time limit of ``collect`` is for the first completion; others may take longer."""
        engine, (long, short) = bench.holding("endless"), bench.requests("ready", [3, 4])
        for _ in range(3):  # on a busy machine the long one may be done too
            engine.submit([long], self._endless(bench))
            engine.submit([short], SamplingParams(2))
            began = time.monotonic()
            ready = [(c.request_id, c.finish_reason) for c in engine.collect(self.deadline_s)]
            seconds = time.monotonic() - began
            engine.abort([long.request_id])
            self.collect(engine, [request for request in (long, short) if request.request_id not in dict(ready)])
            assert seconds < self.deadline_s / 2, (
                f"collect returned {ready} after {seconds:.0f} s of at most {self.deadline_s:g}: its time limit is for "
                "the first completion, with which it returns."
            )
            if ready == [(short.request_id, "length")]:
                return
        raise AssertionError(f"collect must return the short request as soon as it is done, and returned {ready}.")

    @applies_to("streaming")
    def test_concurrent_submission(self, bench: Bench) -> None:
        """Environments submit from threads of their own."""
        engine = bench.holding()
        parts = [bench.requests(f"thread {index}", [2, 9], num_samples=2) for index in range(4)]
        threads = [threading.Thread(target=engine.submit, args=(part, GREEDY)) for part in parts]
        for thread in threads:
            thread.start()
        requests = [request for part in parts for request in part]
        completions = self.collect(engine, requests)
        for thread in threads:
            thread.join()
        bench.assert_greedy(requests, completions, "Requests of several threads must not mix.")

    @applies_to("streaming")
    def test_abort_returns_what_there_is(self, bench: Bench) -> None:
        for wait_s in (0.2, 0.5, 2.0):  # until it has a token
            partial = self._abort_one(bench, wait_s)
            if partial.finish_reason == "abort" and len(partial.token_ids):
                return
        assert partial.finish_reason == "abort", self._not_stopped(partial)
        raise AssertionError("abort must return the tokens that there are, and returned none after 2 s.")

    def _abort_one(self, bench: Bench, wait_s: float) -> Completion:
        """Return what came back of a request that was aborted after a time; fail if abort touched others.

        On a busy machine the abort may arrive only when all have run to their ends.
        """
        engine, sampling = bench.holding("endless"), self._endless(bench)
        aborted, running, short = bench.requests("aborted", [3, 3, 3])
        engine.submit([aborted, running], sampling)
        engine.submit([short], SamplingParams(20))
        early = engine.collect(wait_s)  # not time.sleep: some engines generate only within collect
        engine.abort([aborted.request_id])
        there = {completion.request_id for completion in early}
        left = [request for request in (aborted, short) if request.request_id not in there]
        done = {c.request_id: c for c in [*early, *self.collect(engine, left, [running])]}
        late = [] if running.request_id in done else engine.collect(0.2)
        others = "abort must leave others alone"
        assert all(c.request_id == running.request_id for c in late), f"{others}: one came back again."
        done |= {c.request_id: c for c in late}
        partial, whole, ended = done[aborted.request_id], done[short.request_id], done.get(running.request_id)
        assert (whole.finish_reason, len(whole.token_ids)) == ("length", 20), f"{others}: a short one was cut."
        if ended is not None:
            assert ended.finish_reason == "length", f"{others}: one that was not named ended early."
        else:
            engine.abort([running.request_id])
            self.collect(engine, [running])
        if partial.finish_reason == "length" and ended is not None:
            return partial
        assert partial.finish_reason == "abort", self._not_stopped(partial)
        assert len(partial.token_ids) < sampling.max_new_tokens, "an aborted request ran to its end."
        assert len(partial.logprobs) == len(partial.token_ids), "there must be one logprob per token."
        return partial

    def _not_stopped(self, completion: Completion) -> str:
        return (
            f"after {len(completion.token_ids)} tokens, an aborted request came back as {completion.finish_reason!r}: "
            "abort must stop it, and return what it has so far with finish_reason 'abort'."
        )

    @applies_to("streaming")
    def test_abort_returns_what_waits_too(self, bench: Bench) -> None:
        """More requests than an engine runs at once: those that have not begun come back as well."""
        engine = bench.holding("endless")
        requests = bench.requests("waiting", [3], num_samples=NUM_WAITING)
        engine.submit(requests, SamplingParams(30))
        engine.abort([request.request_id for request in requests])
        reasons = {completion.finish_reason for completion in self.collect(engine, requests)}
        assert reasons <= {"abort", "length"}, f"aborted requests came back as {sorted(reasons)}."
        engine.submit(requests, SamplingParams(3))  # as one that had no token yet: its name is the same
        found = {(each.finish_reason, len(each.token_ids)) for each in self.collect(engine, requests)}
        assert found == {("length", 3)}, (
            f"submitted again, requests that were aborted before came back as {sorted(found)}."
        )

    @applies_to("streaming")
    def test_abort_stops_only_what_has_its_name(self, bench: Bench) -> None:
        """Names of requests may begin or end alike: an engine's library may take a part of one for several."""
        engine, (request,) = bench.holding("endless"), bench.requests("alike", [3])
        name, sampling = request.request_id, self._endless(bench)
        others = [replace(request, request_id=each) for each in (f"{name}0", f"{name}/1", f"0{name}", name.upper())]
        engine.submit([request], sampling)
        engine.submit(others, SamplingParams(40))
        engine.abort([name])
        for completion in self.collect(engine, [request, *others])[1:]:
            found = (completion.finish_reason, len(completion.token_ids))
            assert found == ("length", 40), (
                f"after abort([{name!r}]), {completion.request_id!r} came back as {found[0]!r} with {found[1]} of 40 "
                "tokens: abort stops the requests that it names, and none of a similar name."
            )

    @applies_to("streaming")
    def test_abort_of_what_is_done_changes_nothing(self, bench: Bench) -> None:
        """A request may end before its abort arrives."""
        engine, requests = bench.holding(), bench.requests("done", [3])
        engine.submit(requests, GREEDY)
        self.collect(engine, requests)
        engine.abort([requests[0].request_id])
        assert engine.collect(0.2) == [], "an aborted request that was done before came back a second time."
        ended = bench.requests("done and not collected", [3])
        engine.submit(ended, GREEDY)
        time.sleep(0.5)  # it is ready meanwhile, where an engine generates by itself
        engine.abort([ended[0].request_id])
        self.collect(engine, ended)
        assert engine.collect(0.2) == [], "what was aborted when it waited to be collected came back a second time."
        engine.submit(requests, GREEDY)
        (again,) = self.collect(engine, requests)
        assert again.finish_reason != "abort", "a request was stopped by the abort of one that was done before."

    def collect(
        self, engine: RolloutEngine, requests: Sequence[Request], others: Sequence[Request] = ()
    ) -> list[Completion]:
        """Return the completions of ``requests`` in their order; fail if one is late or unexpected.

        ``others`` are not waited for; those that end meanwhile follow.
        """
        waiting = {request.request_id for request in requests}
        running = {request.request_id for request in others}
        collected: dict[str, Completion] = {}
        deadline = time.monotonic() + self.deadline_s
        while waiting:
            assert time.monotonic() < deadline, (
                f"{len(waiting)} of {len(requests)} requests did not come back within {self.deadline_s} s, such as "
                f"{min(waiting)!r}."
            )
            for completion in engine.collect(1.0):
                assert completion.request_id in waiting | running, (
                    f"collect returned {completion.request_id!r} with the finish reason "
                    f"{completion.finish_reason!r}: it was not submitted, came back before, or must still run."
                )
                waiting.discard(completion.request_id)
                running.discard(completion.request_id)
                collected[completion.request_id] = completion
        return [collected[id_] for request in [*requests, *others] if (id_ := request.request_id) in collected]

    def assert_nothing_collected(self, engine: RolloutEngine, when: str) -> None:
        """Fail unless ``collect`` returns an empty list in time."""
        began = time.monotonic()
        completions = engine.collect(0.2)
        seconds = time.monotonic() - began
        assert completions == [], f"collect(0.2) returned {len(completions)} completions when {when}."
        assert seconds < 0.2 + SLACK_S, f"collect(0.2) took {seconds:.1f} s when {when}: its deadline is the argument."

    def _endless(self, bench: Bench) -> SamplingParams:
        return SamplingParams(bench.max_context - 10)
