"""Checks of an engine's inputs and outputs: unchanged prompts, and the order and the end of completions."""

from __future__ import annotations

import math
import random

import numpy
import pytest

from rlplug.errors import RunError
from rlplug.testing.base import EngineChecks
from rlplug.testing.bench import GREEDY, Bench, generator_states, moved, requests_for
from rlplug.types import SamplingParams


class TokenChecks(EngineChecks):
    """Checks of token ids: prompts in, completions out."""

    def test_prompts_are_used_as_they_are(self, bench: Bench) -> None:
        """Special and padding ids inside prompts are tokens like all others."""
        bench.holding()
        end, pad = bench.spec.eos_token_ids[0], bench.spec.pad_token_id
        plain = bench.prompts("as they are", [1, 2, 5, 40, 200])
        special = [(pad, *plain[2], pad), (*plain[2], end, *plain[1], end), (pad,), (end,), (end, pad, end, pad)]
        requests = requests_for("as they are", plain + special)
        bench.assert_greedy(
            requests,
            bench.generate(requests, GREEDY),
            "The engine must continue prompt_ids: do not add a BOS, strip or mask special or padding ids, truncate, or "
            "convert to text. Only the end tokens of the model's generation_config.json may have an effect.",
        )

    def test_results_are_in_the_order_of_requests(self, bench: Bench) -> None:
        bench.holding()
        requests = bench.requests("order", [30, 1, 100, 2, 7, 64], num_samples=3)
        random.Random(0).shuffle(requests)
        completions = bench.generate(requests, SamplingParams(6))
        assert [c.request_id for c in completions] == [r.request_id for r in requests], (
            "generate must return one completion per request, in the order of the requests."
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

    def test_completions_are_well_formed(self, bench: Bench) -> None:
        bench.holding()
        sampling, num_tokens = SamplingParams(20), bench.policy().model.config.vocab_size
        for completion in bench.generate(bench.requests("form", [1, 6, 33], num_samples=4), sampling):
            assert 1 <= len(completion.token_ids) <= 20, f"{len(completion.token_ids)} tokens of at most 20."
            assert len(completion.logprobs) == len(completion.token_ids), "there must be one logprob per token."
            ids, logprobs = completion.token_ids, completion.logprobs
            assert getattr(ids, "dtype", None) == numpy.int32, f"token_ids must be integers: {ids!r}"
            assert all(0 <= token < num_tokens for token in ids), f"token_ids must be below {num_tokens}: {ids}"
            assert getattr(logprobs, "dtype", None) == numpy.float32, f"logprobs must be numbers: {logprobs!r}"

    def test_every_end_token_ends_and_is_included(self, bench: Bench) -> None:
        bench.holding("ending")
        ends = set(bench.spec.eos_token_ids)
        completions = bench.generate(bench.requests("ends", [2, 9], num_samples=40), SamplingParams(8))
        stopped = [c for c in completions if c.finish_reason == "stop"]
        cut = [c for c in completions if c.finish_reason == "length"]
        assert len(stopped) + len(cut) == len(completions), "finish_reason must be 'stop' or 'length' here."
        assert all(c.token_ids[-1] in ends for c in stopped), (
            f"a completion that stopped must include its end token, one of PolicySpec.eos_token_ids {sorted(ends)}."
        )
        assert all(not ends & set(c.token_ids[:-1].tolist()) for c in stopped) and all(  # noqa: PT018
            not ends & set(c.token_ids.tolist()) for c in cut
        ), f"generation went on after an end token: each of {sorted(ends)} must end a completion."
        assert all(len(c.token_ids) == 8 for c in cut), "finish_reason 'length' before max_new_tokens was reached."
        assert len(stopped) > 20, f"{len(stopped)} of {len(completions)} completions stopped: more than half should."
        assert {c.token_ids[-1] for c in stopped} == ends, f"every one of {sorted(ends)} must be an end token."

    def test_context_ends_a_completion(self, bench: Bench) -> None:
        """A request that reaches the end of the context does not shorten the others."""
        bench.holding("endless")
        context = bench.spec.max_context
        requests = bench.requests("context", [context - 1, 5, context - 3])
        completions = bench.generate(requests, SamplingParams(10))
        lengths = [len(c.token_ids) for c in completions]
        assert lengths == [1, 10, 3], (
            f"prompts that leave 1, 10 and 3 tokens of max_context={context} gave completions of lengths {lengths}."
        )
        assert {c.finish_reason for c in completions} == {"length"}, "the end of the context is finish_reason 'length'."

    def test_prompt_beyond_the_context_is_refused_by_request_id(self, bench: Bench) -> None:
        bench.holding()
        context = bench.spec.max_context
        for length in (context, context + 5):
            requests = bench.requests("beyond", [3, length])
            with pytest.raises(RunError) as refusal:
                bench.generate(requests, GREEDY)
            assert requests[1].request_id in str(refusal.value), (
                f"the error must name the request {requests[1].request_id!r}: {refusal.value}"
            )
        bench.assert_holds("first", "after a refusal", [4], "A refused request must leave the engine usable.")

    def test_stats_are_finite(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.generate(bench.requests("stats", [3]), GREEDY)
        for name, value in engine.stats().items():
            assert type(name) is str, f"stats() has the key {name!r}, which is no str."
            assert type(value) is float, f"stats()[{name!r}] is {value!r}: give a float."
            assert math.isfinite(value), f"stats()[{name!r}] is {value!r}: give a finite number."

    def test_advice_is_text(self, bench: Bench) -> None:
        engine = bench.holding()
        bench.generate(bench.requests("advice", [3]), GREEDY)
        advice = engine.advice()
        assert type(advice) is list, f"advice() returned {advice!r}: give a list, an empty one when there is none."
        for piece in advice:
            assert type(piece) is str, f"advice() has {piece!r}, which is no str."
            assert piece.strip(), "advice() has an empty piece, and each is printed: leave it out."

    def test_global_random_generators_are_left_alone(self, bench: Bench) -> None:
        """The trainer's own random numbers must not depend on the engine: a resumed run would differ."""
        bench.holding()
        bench.sync()
        before = generator_states()
        bench.generate(bench.requests("generators", [3]), SamplingParams(4))
        names = bench.moved_generators | moved(before)
        assert not names, (
            f"start, update_weights or generate moved the global generators {sorted(names)} of the trainer's process: "
            "draw from generators of your own, or restore theirs."
        )
