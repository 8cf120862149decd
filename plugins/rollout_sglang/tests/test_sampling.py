"""What SGLang is asked for, and what is made of its answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlplug_rollout_sglang.sampling import SAMPLING_EXTRA, Output, sampling_arguments, to_completion

from rlplug.errors import RunError
from rlplug.interfaces import PolicySpec
from rlplug.types import Request, SamplingParams

SPEC = PolicySpec("folder", torch.bfloat16, eos_token_ids=(1, 7), pad_token_id=0, max_context=4096)
REQUEST = Request("0/1/2", (3, 4), seed=5)


def answer(reason: str = "stop", scored: int = 3, **about: Any) -> dict[str, Any]:
    """Return what SGLang yields for a request that is done."""
    token_ids = [8, 9, 1]
    logprobs = [(-0.5 * (place + 1), token, None) for place, token in enumerate(token_ids)][:scored]
    known = {"prompt_tokens": 2, "cached_tokens": 1, "num_retractions": 0, "completion_tokens": 3}
    meta_info = {"finish_reason": {"type": reason}, "output_token_logprobs": logprobs, "weight_version": "4"}
    return {"output_ids": token_ids, "meta_info": {**known, **meta_info, **about}}


def test_sampling_arguments_name_every_end_token() -> None:
    arguments = sampling_arguments(REQUEST, SamplingParams(10, temperature=0.7, top_p=0.9), SPEC, room=6)
    assert arguments == {
        "max_new_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "sampling_seed": 5,
        "stop_token_ids": [1, 7],
        "ignore_eos": False,
    }


def test_limits_and_seeds_are_what_sglang_takes() -> None:
    short = Request("a", (1,), seed=(1 << 64) - 1, max_new_tokens=4)
    arguments = sampling_arguments(short, SamplingParams(10, top_k=5), SPEC, room=600)
    assert arguments["max_new_tokens"] == 4
    assert arguments["top_k"] == 5
    assert 0 <= arguments["sampling_seed"] < 1 << 63


def test_extra_options_reach_sglang_beside_rlplugs_own() -> None:
    sampling = SamplingParams(10, extra={"min_p": 0.1})
    arguments = sampling_arguments(REQUEST, sampling, SPEC, room=6)
    assert arguments == sampling_arguments(REQUEST, SamplingParams(10), SPEC, room=6) | {"min_p": 0.1}
    assert not (arguments.keys() - {"min_p"}) & SAMPLING_EXTRA


def test_answer_becomes_a_completion() -> None:
    output = Output.of(answer())
    completion = to_completion(REQUEST, SamplingParams(10), output, end_tokens=(), version=4)
    assert completion.request_id == "0/1/2"
    assert completion.token_ids.tolist() == [8, 9, 1]
    assert completion.logprobs.tolist() == [-0.5, -1.0, -1.5]
    assert completion.finish_reason == "stop"
    assert completion.policy_version == 4
    assert (output.prompt_tokens, output.cached_tokens, output.retractions) == (2, 1, 0)


def test_what_never_ran_is_an_empty_completion() -> None:
    """An answer as SGLang makes it of a request that is aborted while it waits."""
    meta_info = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "4"}
    never = {"output_ids": [], "meta_info": {**meta_info, "completion_tokens": 0, "output_token_logprobs": []}}
    completion = to_completion(REQUEST, SamplingParams(10), Output.of(never), end_tokens=(), version=4)
    assert len(completion.token_ids) == len(completion.logprobs) == 0
    assert completion.finish_reason == "abort"


def test_aborted_tokens_without_logprobs_are_left_out() -> None:
    output = Output.of(answer("abort", scored=2))
    assert output.token_ids.tolist() == [8, 9]
    assert len(output.logprobs) == 2
    with pytest.raises(AssertionError, match="one logprob for each token"):
        Output.of(answer("stop", scored=2))


@pytest.mark.parametrize(
    ("sampling", "logprobs"),
    [
        (SamplingParams(10, top_k=1), (0.0, 0.0, 0.0)),
        (SamplingParams(10, top_k=2), (-0.5, -1.0, -1.5)),
        (SamplingParams(10, temperature=0.0), (-0.5, -1.0, -1.5)),
        (SamplingParams(10, temperature=0.0, top_k=1), (-0.5, -1.0, -1.5)),
    ],
)
def test_a_draw_without_a_choice_is_certain(sampling: SamplingParams, logprobs: tuple[float, ...]) -> None:
    completion = to_completion(REQUEST, sampling, Output.of(answer()), end_tokens=(), version=4)
    assert tuple(completion.logprobs) == logprobs


def test_other_weights_are_no_completion() -> None:
    with pytest.raises(RunError, match=r"request 0/1/2: SGLang generated with weights of version 4.*has version 5"):
        to_completion(REQUEST, SamplingParams(10), Output.of(answer()), end_tokens=(), version=5)


def test_unknown_finish_reason_is_no_completion() -> None:
    with pytest.raises(RunError, match="'error'"):
        to_completion(REQUEST, SamplingParams(10), Output.of(answer("error")), end_tokens=(), version=4)


def test_an_end_token_that_is_the_last_possible_token_has_ended_it():
    output = Output.of(answer("length"))
    last = output.token_ids[-1]
    assert (
        to_completion(REQUEST, SamplingParams(10), output, end_tokens=(last + 1,), version=4).finish_reason == "length"
    )
    assert to_completion(REQUEST, SamplingParams(10), output, end_tokens=(last,), version=4).finish_reason == "stop"
