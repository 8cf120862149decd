"""Checks of the form of an engine's answers: well-formed, complete, in order, of the right version."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
from transformers import AutoTokenizer

from rlplug.models.hf_files import pretrained
from rlplug.rollout.turns.stop_strings import StopStrings
from rlplug.types import Completion, Request, SamplingParams
from rlplug_devkit.claims import applies_to
from rlplug_devkit.engines.base import EngineChecks
from rlplug_devkit.engines.bench import GREEDY, Bench

NUM_BEFORE_STOP = 6
"""Times that an engine asks whether to stop before it is told to."""
MANY = 300
"""More requests than engines run at once."""
NO_TEXT = "\N{REPLACEMENT CHARACTER}"
"""What a part of a character decodes to."""


class FormChecks(EngineChecks):
    """Checks of completions without a look at what their tokens are."""

    def test_completions_are_well_formed(self, bench: Bench) -> None:
        bench.holding()
        sampling, num_tokens = SamplingParams(20), bench.policy().model.config.vocab_size
        ends = set(bench.spec.eos_token_ids)
        completions = bench.generate(bench.requests("form", [1, 6, 33], num_samples=12), sampling)
        for completion in completions:
            ids, logprobs = completion.token_ids, completion.logprobs
            assert getattr(ids, "dtype", None) == numpy.int32, f"token_ids must be integers: {ids!r}"
            assert 1 <= len(ids) <= 20, f"{len(ids)} tokens of at most 20, and of 1 at least."
            assert all(0 <= token < num_tokens for token in ids), f"token_ids must be below {num_tokens}: {ids}"
            assert len(logprobs) == len(ids), f"{len(logprobs)} logprobs of {len(ids)} tokens: one for each."
            assert getattr(logprobs, "dtype", None) == numpy.float32, f"logprobs must be numbers: {logprobs!r}"
            if bench.capabilities.logprobs:
                assert all(math.isfinite(value) and value <= 1e-4 for value in logprobs), (
                    f"logprobs must be finite and not positive: {logprobs}"
                )
            num_ends = sum(int(token) in ends for token in ids[:-1])
            assert num_ends == 0, f"tokens after an end token, of {sorted(ends)}: {ids.tolist()}"
            reason = "stop" if int(ids[-1]) in ends else "length"
            assert completion.finish_reason == reason, (
                f"finish_reason is {completion.finish_reason!r} after {len(ids)} of at most 20 tokens, and "
                f"{int(ids[-1])} is the last: it must be {reason!r}, for end tokens are {sorted(ends)}."
            )
            assert reason == "stop" or len(ids) == 20, f"finish_reason 'length' after {len(ids)} tokens of 20."

    @pytest.mark.parametrize("num_requests", [18, MANY])
    def test_results_are_in_the_order_of_requests(self, bench: Bench, num_requests: int) -> None:
        """Engines run many requests in several batches."""
        bench.holding()
        requests = bench.requests("order", [30, 1, 100, 2, 7, 64], num_samples=num_requests // 6)
        random.Random(0).shuffle(requests)
        completions = bench.generate(requests, SamplingParams(6 if num_requests < MANY else 1))
        assert [c.request_id for c in completions] == [r.request_id for r in requests], (
            f"generate must return one completion per request, in the order of the {len(requests)} requests."
        )

    def test_no_requests(self, bench: Bench) -> None:
        bench.holding()
        assert bench.generate([], GREEDY) == [], "generate of no requests must return an empty list."

    def test_completions_carry_the_version_of_the_weights(self, bench: Bench) -> None:
        bench.holding()
        for _ in range(2):
            bench.sync()
            versions = {c.policy_version for c in bench.generate(bench.requests("version", [3, 4]), GREEDY)}
            assert versions == {bench.version}, (
                f"completions carry {versions} after update_weights with version={bench.version}: stamp each with "
                "the version of the last complete sync."
            )

    def test_each_request_has_its_own_limit(self, bench: Bench) -> None:
        """``Request.max_new_tokens`` is what a trajectory of several turns has left."""
        bench.holding("endless")
        limits: list[int | None] = [7, 1, None, 30, 3]
        requests = bench.limited("own limits", limits)
        completions = bench.generate(requests, SamplingParams(12))
        lengths = [len(c.token_ids) for c in completions]
        is_mixed = sorted(lengths) == sorted([7, 1, 12, 12, 3])
        hint = " The lengths are right for other requests: keep each completion with its request." if is_mixed else ""
        hint = hint or bench.doubt(requests, completions, SamplingParams(12))
        assert lengths == [7, 1, 12, 12, 3], (
            f"requests with max_new_tokens={limits} gave completions of {lengths} tokens for SamplingParams(12): the "
            f"smaller of both limits is a request's own, and nobody else's.{hint}"
        )

    def test_every_end_token_ends_and_is_included(self, bench: Bench) -> None:
        bench.holding("ending")
        ends = set(bench.spec.eos_token_ids)
        requests = bench.requests("ends", [2, 9], num_samples=40)
        completions = bench.generate(requests, SamplingParams(8))
        stopped = [c for c in completions if c.finish_reason == "stop"]
        cut = [c for c in completions if c.finish_reason == "length"]
        assert len(stopped) + len(cut) == len(completions), "finish_reason must be 'stop' or 'length' here."
        blame = bench.doubt(requests, completions, SamplingParams(8))
        assert all(c.token_ids[-1] in ends for c in stopped), (
            f"a completion that stopped must include its end token, one of PolicySpec.eos_token_ids {sorted(ends)}."
            f"{blame}"
        )
        assert all(not ends & set(c.token_ids[:-1].tolist()) for c in stopped) and all(  # noqa: PT018
            not ends & set(c.token_ids.tolist()) for c in cut
        ), f"generation went on after an end token: each of {sorted(ends)} must end a completion.{blame}"
        assert all(len(c.token_ids) == 8 for c in cut), (
            f"finish_reason 'length' before max_new_tokens was reached.{blame}"
        )
        num, total = len(stopped), len(completions)
        assert num > 20, f"{num} of {total} completions stopped: more than half should.{blame}"
        assert {c.token_ids[-1] for c in stopped} == ends, f"every one of {sorted(ends)} must be an end token.{blame}"

    def test_a_stopped_call_answers_every_request(self, bench: Bench) -> None:
        """The core says so when a run is told to stop; it keeps what is done, and resumes the rest."""
        engine = bench.holding("endless")
        requests = bench.requests("stopped", [3, 9])
        engine.is_stopping = lambda: True
        try:
            completions = bench.generate(requests, SamplingParams(40))
        finally:
            del engine.is_stopping
        assert [c.request_id for c in completions] == [r.request_id for r in requests], (
            "generate must return one completion per request, in their order, also when is_stopping() returns true."
        )
        for completion in completions:
            is_whole = len(completion.token_ids) == 40
            assert completion.finish_reason == ("length" if is_whole else "abort"), (
                f"{len(completion.token_ids)} of 40 tokens came back as {completion.finish_reason!r} after a stop: "
                "what is not complete has the finish reason 'abort'."
            )
        self._assert_stops_midway(bench)
        (request,) = bench.requests("after a stop", [4])
        (whole,) = bench.generate([request], SamplingParams(5))
        assert (len(whole.token_ids), whole.finish_reason) == (5, "length"), (
            "the engine must go on as before when is_stopping() returns false again."
            f"{bench.doubt([request], [whole], SamplingParams(5))}"
        )

    def _assert_stops_midway(self, bench: Bench) -> None:
        """Fail unless a call that is told to stop later returns the tokens so far."""
        engine, sampling = bench.running(), SamplingParams(40)
        requests = bench.requests("stopped midway", [3, 9])
        expected = bench.generate(requests, sampling)
        asked = itertools.count()
        engine.is_stopping = lambda: next(asked) >= NUM_BEFORE_STOP
        try:
            completions = bench.generate(requests, sampling)
        finally:
            del engine.is_stopping
        blame = bench.doubt(requests, expected, sampling)
        for whole, part in zip(expected, completions, strict=True):
            num_tokens = len(part.token_ids)
            advice = (
                f"what is not complete has its tokens so far, their logprobs, and the finish reason 'abort'.{blame}"
            )
            assert part.finish_reason == ("length" if num_tokens == 40 else "abort"), (
                f"{num_tokens} of 40 tokens came back as {part.finish_reason!r} after a stop midway: {advice}"
            )
            assert len(part.logprobs) == num_tokens, f"{len(part.logprobs)} logprobs of {num_tokens} tokens: {advice}"
            is_same = part.token_ids.tolist() == whole.token_ids[:num_tokens].tolist()
            assert is_same or not self.seed_is_exact, (
                f"stopped midway, a request gave {part.token_ids.tolist()}, and {whole.token_ids.tolist()} when it was "
                f"not stopped: {advice}"
            )
        if bench.capabilities.logprobs and not blame:
            kept = [pair for pair in zip(requests, completions, strict=True) if len(pair[1].token_ids)]
            if kept:
                bench.assert_logprobs([r for r, _ in kept], [c for _, c in kept], sampling, "A stop changes no token.")


class StopChecks(EngineChecks):
    """Check of stop strings. Engines need a tokenizer for them, and so this one is an engine of its own."""

    @applies_to("stop_strings")
    def test_stop_strings_end_completions(self, bench: Bench) -> None:
        """After a restart with others too: of many tokens, and of which the prompt has the beginning."""
        bench.holding("endless", family="stopping")
        requests = bench.requests("stop strings", [2, 9], num_samples=40)
        completions, num_stopped = self._stopped(bench, requests)
        assert num_stopped > 10, f"{num_stopped} of {len(completions)} completions stopped: a third should."
        others = _strings_of(bench, requests, completions)
        if bench.capabilities.restart and others:
            bench.close()
            bench.spec = replace(bench.spec, stop=others)
            bench.start()
            bench.sync("endless")
            self._stopped(bench, requests)
            bench.discard()

    def _stopped(self, bench: Bench, requests: Sequence[Request]) -> tuple[list[Completion], int]:
        """Return completions, and how many a stop string has ended; fail unless those are the ones that have it."""
        strings = StopStrings(pretrained(AutoTokenizer.from_pretrained, bench.spec.path), bench.spec)
        completions = bench.generate(requests, SamplingParams(20))
        num_stopped = 0
        for request, completion in zip(requests, completions, strict=True):
            end, num_tokens = strings.end(request.prompt_ids[-1], completion.token_ids), len(completion.token_ids)
            num_stopped += end is not None
            found = (num_tokens, completion.finish_reason)
            assert found == ((20, "length") if end is None else (end, "stop")), (
                f"a completion of {num_tokens} of 20 tokens came back as {completion.finish_reason!r}, and its first "
                f"stop string, of PolicySpec.stop {bench.spec.stop}, ends with token {end}: it must end a completion, "
                "whichever tokens spell it, and be included. What the prompt has of it, and the strings of an earlier "
                "start, end nothing."
            )
        return completions, num_stopped


def _strings_of(bench: Bench, requests: Sequence[Request], completions: Sequence[Completion]) -> tuple[str, ...]:
    """Return strings of many tokens of some completions, and strings that begin in a prompt and end behind it."""
    tokenizer: Any = pretrained(AutoTokenizer.from_pretrained, bench.spec.path)
    long, begun = [], []
    for request, completion in zip(requests, completions, strict=True):
        last, ids = int(request.prompt_ids[-1]), completion.token_ids.tolist()
        prompt, both = tokenizer.decode([last]), tokenizer.decode([last, *ids])
        text = both[len(prompt) :]
        part, across = text[4:12], both[len(prompt) - 1 : len(prompt) + 2]
        if completion.finish_reason == "length" and len(part) == 8 and NO_TEXT not in part:
            long.append(part)
        if prompt and len(across) == 3 and NO_TEXT not in across and across not in text:
            begun.append(across)
    return (*long[:3], *begun[:3])
