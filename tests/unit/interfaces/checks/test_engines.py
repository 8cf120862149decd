"""Faults of rollout engines: each is refused where it comes in, by one message that names the call."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
from typing import Any

import pytest
from unit.interfaces.checks.seam_cases import END, VERSION, VOCAB, Scripted, run_loop

from rlplug.errors import RunError
from rlplug.interfaces import EngineCapabilities, EngineFault, RolloutEngine, SyncReport
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.engines import check_report, check_stats
from rlplug.types import Completion


def twice(good: list[Completion]) -> list[Completion]:
    return [good[0], good[0], good[2]]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Scripted(lambda good: good[:2]), "the completions of 3 requests in their order; it returned 2, and none of"),
        (Scripted(lambda good: [*good, good[0]]), "of 3 requests in their order; it returned 4"),
        (Scripted(lambda good: good[::-1]), "at index 0, where k/0/0 was asked for"),
        (Scripted(twice), "at index 1, where"),
        (Scripted(lambda good: None), "must return a list of completions; it returned NoneType None"),
        (Scripted(lambda good: ["a", *good[1:]]), "must return a list of completions; it returned list ['a'"),
        (Scripted(None, "request_id", "x0/1/0/0"), "returned str 'x0/1/0/0' at index 0"),
        (Scripted(None, "policy_version", VERSION - 1), "policy version 6, and its weights are of version 7"),
        (Scripted(None, "policy_version", None), "policy version None, and its weights are of version 7"),
        (Scripted(None, "token_ids", (5, VOCAB, END)), "the token id 50 at index 1, and the policy has ids from 0 to"),
        (Scripted(None, "token_ids", (5, -1, END)), "the token id -1 at index 1"),
        (Scripted(None, "token_ids", (5, 6, 7, 8, END)), "5 token ids where at most 4 were asked for"),
        (Scripted(None, "token_ids", (5, END)), "3 logprobs for 2 tokens"),
        (Scripted(None, "token_ids", ("a", "b", "c")), "token ids that are not all numbers, but also str 'a'"),
        (Scripted(None, "logprobs", (-0.5, float("nan"), -1)), "the logprob nan at index 1"),
        (Scripted(None, "logprobs", (-0.5, float("-inf"), -1)), "the logprob -inf at index 1"),
        (Scripted(None, "logprobs", (-0.5, 0.5, -1)), "the logprob 0.5 at index 1"),
        (Scripted(None, "logprobs", (-0.5, -1)), "2 logprobs for 3 tokens"),
        (Scripted(None, "finish_reason", "done"), "finish reason str 'done'"),
        (
            Scripted(None, "finish_reason", "length"),
            "finish reason 'length' and the last token 1: it is 'stop'",
        ),
        (Scripted(None, "token_ids", (5, 6, 7)), "finish reason 'stop' and the last token 7: it is 'stop' exactly"),
        (Scripted(None, "token_ids", (5, 2, END)), "3 tokens, and the end token 2 is at index 1"),
        (
            Scripted(lambda good: [dataclasses.replace(good[0], token_ids=(), logprobs=()), *good[1:]]),
            "no token and the finish reason 'stop'",
        ),
    ],
)
def test_an_engine_that_answers_wrongly(engine: RolloutEngine, words: str) -> None:
    """Each trained on before, or ended in an error that named no engine."""
    with pytest.raises(EngineFault) as fault:
        run_loop(engine)
    assert str(fault.value).startswith("Scripted.generate in ")
    assert words in str(fault.value), str(fault.value)


def test_an_engine_that_answers_well_is_believed() -> None:
    assert [len(trajectory.token_ids) for trajectory in run_loop(Scripted())] == [5, 5, 6]


def test_what_one_look_at_all_tokens_finds_is_what_a_look_at_each_finds() -> None:
    """Random faults: the quick check of a whole answer must not accept what the slow one refuses."""
    generator = random.Random(0)
    for _ in range(300):
        token_ids = [generator.choice([0, END, 2, 5, VOCAB - 1, VOCAB, -1][:: generator.choice([1, 2])]) for _ in "abc"]
        logprobs = [generator.choice([-1.0, 0.0, -1.0, -1.0, 2.0]) for _ in "abc"]
        reason = generator.choice(["stop", "length", "abort"])
        change = {"token_ids": token_ids, "logprobs": logprobs, "finish_reason": reason}
        engine = Scripted(lambda good, change=change: [dataclasses.replace(good[0], **change), *good[1:]])
        engine.is_stopping = lambda: True  # type: ignore[method-assign]
        is_good = (
            min(token_ids) >= 0
            and max(token_ids) < VOCAB
            and max(logprobs) <= 0
            and not {END, 2} & set(token_ids[:-1])
            and (
                change["finish_reason"] == "abort" or (token_ids[-1] in (END, 2)) == (change["finish_reason"] == "stop")
            )
        )
        if change["finish_reason"] == "abort" and is_good:
            continue  # nothing asked for it, and the loop would wait for the rest
        with contextlib.nullcontext() if is_good else pytest.raises(EngineFault):
            run_loop(engine)


def test_capabilities_without_logprobs() -> None:
    """An engine that says that it has no logprobs may return NaN."""
    engine = Scripted(None, "logprobs", (float("nan"),) * 3)
    engine.capabilities = EngineCapabilities(logprobs=False)
    assert len(run_loop(engine)) == 3


ENGINE = PluginCall(Scripted(), "update_weights")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_report(ENGINE, None, 3), "must return a SyncReport; it returned NoneType None"),
        (lambda: check_report(ENGINE, SyncReport(1, 1, 1, 0.0, 2), 3), "report policy version 3; it reported 2"),
        (lambda: check_report(ENGINE, SyncReport(1, 1, 1, 0.0, 3, {"stop": None}), 3), "a number as metric 'stop'"),
        (lambda: check_stats(ENGINE, {"a": "fast"}, frozenset()), "a number as metric 'a'; it returned str 'fast'"),
        (lambda: check_stats(ENGINE, {"restarts": 1.0}, frozenset({"restarts"})), "'restarts', which rlplug measures"),
        (lambda: check_stats(ENGINE, [1.0], frozenset()), "metrics as a mapping of names to numbers"),
    ],
)
def test_an_engine_that_reports_wrongly(call: Any, words: str) -> None:
    with pytest.raises(RunError, match=re.escape(words)):
        call()
