"""Stop strings: where a completion ends, whichever tokens and requests spell the string."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from rlplug.interfaces import PolicySpec
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.rollout.completion_checks import CompletionChecks
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.hf_engine import HFRollout
from rlplug.rollout.trajectory import new_trajectories
from rlplug.rollout.turns.stop_strings import StopStrings
from rlplug.setup import start
from rlplug.types import Completion, Prompt

TOKENS = ["<eos>", "<end>", "x", "<", "/a", ">", "/a>y", "<b"]
EOS, END, X, OPEN, NAME, CLOSE, CLOSED_AND_MORE, OTHER = range(len(TOKENS))
POLICY = PolicySpec("folder", torch.float32, (EOS,), EOS, max_context=100, stop=("</a>", "<end>"))


def strings(policy: PolicySpec = POLICY) -> StopStrings:
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
    tokenizer.decoder = decoders.Fuse()  # the text is that of all tokens, with nothing between
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", additional_special_tokens=["<end>"])
    return StopStrings(made, policy)


@pytest.mark.parametrize(
    ("token_ids", "end"),
    [
        ([X, OPEN, NAME, CLOSE, X, X], 4),
        ([X, OPEN, CLOSED_AND_MORE, X], 3),
        ([X, END, X], 2),
        ([OPEN, NAME, CLOSE, END], 3),
        ([OPEN, NAME, X, CLOSE], None),
        ([NAME, CLOSE, X], None),  # the token before is the prompt's
        ([], None),
    ],
)
def test_a_completion_ends_with_the_token_that_completes_the_first_string(
    token_ids: list[int], end: int | None
) -> None:
    assert strings().end(OPEN, token_ids) == end


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_string_that_begins_in_an_earlier_request_ends_the_turn(reason: str) -> None:
    """Alone catches a partial rollout that writes on: the engine sees only what this step adds."""
    (trajectory,) = new_trajectories([Prompt("p", (X, X), "")], [0], 1, "0/1")
    trajectory.add_completion(Completion(trajectory.request_id, (X, OPEN), (-1.0, -1.0), "length", 0), ends_turn=False)
    completion = Completion(trajectory.request_id, (NAME, CLOSE, X), (-1.0, -2.0, -3.0), reason, 0)

    (accepted,), fault = accept(trajectory, completion)

    assert fault is None
    assert accepted.finish_reason == "stop"
    assert accepted.token_ids.tolist() == [NAME, CLOSE]
    assert accepted.logprobs.tolist() == [-1.0, -2.0]


def test_experts_end_with_the_tokens() -> None:
    (trajectory,) = new_trajectories([Prompt("p", (X, X), "")], [0], 1, "0/1")
    experts = np.arange(5, dtype=np.int16).reshape(5, 1, 1)
    completion = Completion(trajectory.request_id, (X, END, X), (-1.0,) * 3, "length", 0, experts)
    cut = strings().cut("an engine", trajectory, completion)  # type: ignore[arg-type]
    assert cut.routed_experts.tolist() == experts[:4].tolist()


def test_an_engine_that_stops_for_no_reason_is_a_fault() -> None:
    """Alone catches completions that an engine cut short at another string than the run's."""
    (trajectory,) = new_trajectories([Prompt("p", (X, X), "")], [0], 1, "0/1")
    stopped = Completion(trajectory.request_id, (X, OPEN), (-1.0, -1.0), "stop", 0)
    accepted, fault = accept(trajectory, stopped)
    assert not accepted
    assert "returned finish reason 'stop' without an end token or a stop string" in str(fault)
    (ended,), fault = accept(trajectory, replace(stopped, token_ids=(X, EOS)))
    assert (fault, ended.token_ids.tolist()) == (None, [X, EOS])


def accept(trajectory, completion):
    checks = CompletionChecks(lambda _: 8, POLICY, 0, strings())
    call = PluginCall(HFRollout(), "generate")
    accepted, fault = checks.accept(call, [completion], {trajectory.request_id: trajectory})
    return [each for _, each in accepted], fault


def test_a_run_cuts_at_its_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a run whose engine generates on after a stop string, and nobody cuts."""
    monkeypatch.setattr(start, "RolloutGenerator", lambda driver, tokenizer, make_rules, *_: make_rules())
    config = SimpleNamespace(environment=None, turns=TurnOptions())
    for stop, is_cut in (("</a>",), True), ((), False):
        inputs = SimpleNamespace(spec=replace(POLICY, stop=stop), tokenizer=None)
        rules = start.make_generator(config, inputs, None, None)  # type: ignore[arg-type]
        assert (rules.stop is not None) is is_cut  # type: ignore[attr-defined]
