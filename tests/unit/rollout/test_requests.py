"""Requests and their seeds, and completions joined with their prompts."""

from __future__ import annotations

import pytest

from rlplug.batching import rank_share
from rlplug.policy import PolicyConfig, load_tokenizer
from rlplug.rollout.requests import make_requests, to_samples
from rlplug.types import Completion, Prompt

PROMPTS = [Prompt(uid=f"p{i}", token_ids=(10, i + 2), text="", answer=str(i)) for i in range(6)]


def completion_of(token_ids, reason="stop", version=3):
    logprobs = tuple(-0.5 * (i + 1) for i in range(len(token_ids)))
    return Completion("", tuple(token_ids), logprobs, reason, version)


def test_requests_are_in_order_and_named():
    requests = make_requests(PROMPTS[:2], [4, 5], 3, "0/7")
    assert [r.request_id for r in requests] == [f"0/7/{group}/{sample}" for group in (4, 5) for sample in range(3)]
    assert [r.prompt_ids for r in requests] == [(10, 2)] * 3 + [(10, 3)] * 3


def test_seeds_differ_between_samples_groups_and_steps():
    seeds = [r.seed for key in ("0/7", "0/8", "1/7") for r in make_requests(PROMPTS, range(6), 4, key)]
    assert len(set(seeds)) == len(seeds) == 72
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) == 72  # torch's CPU generator uses 32 bits


def test_seeds_are_the_same_on_any_number_of_ranks():
    whole = make_requests(PROMPTS, range(6), 4, "0/7")
    for world_size in (2, 3, 4):
        shares = [
            make_requests(rank_share(PROMPTS, rank, world_size), rank_share(range(6), rank, world_size), 4, "0/7")
            for rank in range(world_size)
        ]
        assert [request for share in shares for request in share] == whole


def test_samples_join_prompts_and_completions(model_folder):
    tokenizer = load_tokenizer(PolicyConfig(path=str(model_folder("llama"))))
    completions = [completion_of([2, 3, 1]), completion_of([4], "length"), completion_of([]), completion_of([1, 5])]
    samples = to_samples(PROMPTS[:2], [8, 9], completions, tokenizer)
    assert [(s.prompt.uid, s.group) for s in samples] == [("p0", 8), ("p0", 8), ("p1", 9), ("p1", 9)]
    first = samples[0]
    assert first.token_ids == (10, 2, 2, 3, 1)
    assert first.response_mask == (False, False, True, True, True)
    assert first.rollout_logprobs == (0.0, 0.0, -0.5, -1.0, -1.5)
    assert (first.finish_reason, first.policy_version, first.num_response_tokens) == ("stop", 3, 3)
    assert [s.completion for s in samples] == ["01", "2", "", "3"]  # ids 2, 3, ... are the digits; 1 is the end token
    assert samples[1].finish_reason == "length"
    assert samples[2].token_ids == (10, 3)
    assert all(s.rewards == {} for s in samples)


def test_a_rank_without_prompts():
    assert to_samples([], [], [], tokenizer=None) == []


def test_prompts_and_groups_must_match():
    with pytest.raises(ValueError, match="zip"):
        make_requests(PROMPTS, [0], 1, "k")
