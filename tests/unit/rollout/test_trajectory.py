"""Trajectories: their requests and seeds, what is appended to them, and what trains."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rlplug_engines.colocated import experts_of_request
from rollout_generators import TextlessTokenizer, samples_of

from rlplug.distributed.mesh import rank_share
from rlplug.interfaces.rollout import EngineFault
from rlplug.interfaces.router_replay import RouterShape
from rlplug.models.config import ModelConfig, load_tokenizer
from rlplug.rollout.routed_experts import check_routed_experts
from rlplug.rollout.trajectory import Trajectory, new_trajectories, to_samples
from rlplug.types import Completion, Prompt, RewardError, Segment, StepBatch

PROMPTS = [Prompt(uid=f"p{i}", token_ids=(10, i + 2), text="", answer=str(i)) for i in range(6)]


def make_requests(prompts, groups, num_samples, key):
    return [trajectory.request(None) for trajectory in new_trajectories(prompts, groups, num_samples, key)]


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
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder("llama"))))
    completions = [completion_of([2, 3, 1]), completion_of([4], "length"), completion_of([]), completion_of([1, 5])]
    samples = samples_of(new_trajectories(PROMPTS[:2], [8, 9], 2, "k"), completions, tokenizer)
    assert [(s.prompt.uid, s.group) for s in samples] == [("p0", 8), ("p0", 8), ("p1", 9), ("p1", 9)]
    first = samples[0]
    assert first.token_ids.tolist() == [10, 2, 2, 3, 1]
    assert first.response_mask.tolist() == [False, False, True, True, True]
    assert first.rollout_logprobs.tolist() == [0.0, 0.0, -0.5, -1.0, -1.5]
    assert (first.finish_reason, first.policy_version, first.num_response_tokens) == ("stop", 3, 3)
    assert [s.completion for s in samples] == ["01", "2", "", "3"]  # ids 2, 3, ... are the digits; 1 is the end token
    assert samples[1].finish_reason == "length"
    assert samples[2].token_ids.tolist() == [10, 3]
    assert all(s.rewards == {} for s in samples)


def test_a_rank_without_prompts():
    assert to_samples([], tokenizer=None, has_environment=False) == []


def test_prompts_and_groups_must_match():
    with pytest.raises(ValueError, match="zip"):
        make_requests(PROMPTS, [0], 1, "k")


def grown() -> Trajectory:
    """Two turns of different versions, the second in two pieces, with an observation between the turns."""
    (trajectory,) = new_trajectories(PROMPTS[:1], [8], 1, "k")
    trajectory.add_completion(completion_of([5, 1], version=3), ends_turn=True)
    trajectory.add_observation([7, 7, 7])
    trajectory.add_completion(completion_of([2], "length", version=3), ends_turn=False)
    trajectory.add_completion(completion_of([3, 1], version=4), ends_turn=True)
    return trajectory


def test_observations_are_never_trained():
    trajectory = grown()
    trajectory.finish_reason = "stop"
    (sample,) = to_samples([trajectory], TextlessTokenizer(), has_environment=True)
    assert sample.token_ids.tolist() == [10, 2, 5, 1, 7, 7, 7, 2, 3, 1]
    assert sample.response_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert sample.rollout_logprobs.tolist() == [0.0, 0.0, -0.5, -1.0, 0.0, 0.0, 0.0, -0.5, -0.5, -1.0]
    assert sample.policy_versions().tolist() == [-1, -1, 3, 3, -1, -1, -1, 3, 4, 4]
    assert (sample.policy_version, sample.num_turns) == (3, 2)
    assert sample.segments[1:] == (Segment(7, 8, 3, False), Segment(8, 10, 4, True))


def test_turns_are_whole():
    trajectory = grown()
    assert [turn.tolist() for turn in trajectory.turns()] == [[5, 1], [2, 3, 1]]
    assert trajectory.num_turns == 2
    assert trajectory.num_in_turn == 0
    trajectory.add_completion(completion_of([4, 4], "length"), ends_turn=False)
    assert trajectory.num_in_turn == 2


def test_each_request_of_a_trajectory_has_a_seed_of_its_own():
    trajectory, requests = grown(), []
    for _ in range(3):
        requests.append(trajectory.request(9))
        trajectory.add_completion(completion_of([1]), ends_turn=True)
    assert [request.request_id for request in requests] == ["k/8/0/3", "k/8/0/4", "k/8/0/5"]
    assert len({request.seed for request in requests}) == 3
    assert requests[1].prompt_ids == (*requests[0].prompt_ids, 1)
    assert all(request.max_new_tokens == 9 for request in requests)


def test_a_checkpoint_holds_all_of_a_trajectory():
    trajectory = grown()
    trajectory.reward, trajectory.error, trajectory.turn_was_cut = 0.5, "hangs", True
    state = trajectory.state_dict()
    trajectory.add_observation([9])  # later steps do not change what was saved
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = Trajectory.from_state(torch.load(file, weights_only=True), PROMPTS[0])
    assert again != trajectory
    again.add_observation([9])
    assert again == trajectory


def test_the_reward_of_a_failed_environment_is_an_error():
    trajectory = grown()
    trajectory.finish_reason, trajectory.error, trajectory.reward = "abort", "ValueError: no", 1.0
    trajectory.error_kind = "raised"
    (sample,) = to_samples([trajectory], TextlessTokenizer(), has_environment=True)
    assert sample.errors == {"environment": RewardError("ValueError: no", "raised")}
    assert sample.reward != sample.reward


ROUTERS = RouterShape(layers=(0, 2), num_experts=8, top_k=2)


def experts_of(num_tokens, first):
    """Return experts whose first one counts on from ``first``; the last token has none."""
    experts = ROUTERS.empty(num_tokens)
    experts[:-1] = (np.arange(first, first + num_tokens - 1) % 7)[:, None, None] + np.arange(2)
    return experts


def test_the_experts_of_each_token_are_those_of_its_first_pass():
    """A turn, an observation, then a continuation by newer weights, kept in a checkpoint between them."""
    (trajectory,) = new_trajectories(PROMPTS[:1], [0], 1, "k")
    first, second = experts_of(4, first=0), experts_of(8, first=3)
    trajectory.add_completion(replace(completion_of([2, 3]), routed_experts=first), ends_turn=True)
    trajectory.add_observation([4, 5])
    saved = trajectory.state_dict()
    assert (trajectory.experts_of_all_tokens()[3:] == -1).all()
    assert len(trajectory.experts_of_all_tokens()) == 6
    trajectory = Trajectory.from_state(saved, PROMPTS[0])
    trajectory.add_completion(replace(completion_of([6, 1], version=4), routed_experts=second), ends_turn=True)
    trajectory.finish_reason = "stop"
    assert (first[:3] != second[:3]).all()
    expected = np.concatenate([first[:3], second[3:]])
    (sample,) = to_samples([trajectory], TextlessTokenizer(), has_environment=False)
    assert np.array_equal(sample.routed_experts, expected)
    assert sample.routed_experts.dtype == np.int8
    assert isinstance(saved["routed_experts"], torch.Tensor)
    assert np.array_equal(saved["routed_experts"].numpy(), first)
    batch = StepBatch.from_samples([sample, replace(sample, routed_experts=None), sample])
    nothing = np.full_like(expected, -1)
    assert np.array_equal(batch.per_token["routed_experts"], np.concatenate([expected, nothing, expected]))
    assert np.array_equal(batch.select([2, 1]).per_token["routed_experts"], np.concatenate([expected, nothing]))


def test_what_engines_return_of_all_layers_is_cut_to_those_with_a_router():
    rows = np.arange(3 * 4 * 2, dtype=np.uint8).reshape(3, 4, 2) % 8
    experts = experts_of_request("E", rows, 4, ROUTERS)
    assert experts.dtype == np.int8
    assert np.array_equal(experts[:-1], rows[:, [0, 2]])
    assert (experts[-1] == -1).all()
    assert (experts_of_request("E", None, 4, ROUTERS) == -1).all()
    for wrong in (rows[:2], rows[:, :2], rows[..., :1]):
        with pytest.raises(EngineFault, match="E returned routed experts of shape"):
            experts_of_request("E", wrong, 4, ROUTERS)
    with pytest.raises(EngineFault, match="E returned the expert 200, and the policy has experts from 0 to 7"):
        experts_of_request("E", np.full_like(rows, 200), 4, ROUTERS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda e: None, "routed experts of NoneType None, and not an array of integers"),
        (lambda e: e.astype(float), "of dtype float64, and not an array of integers"),
        (lambda e: e[:-1], r"of shape \[3, 2, 2\], and not \[4, 2, 2\]"),
        (lambda e: e.__setitem__((1, 1, 0), 8) or e, "the expert 8, and the policy has experts from 0 to 7"),
        (lambda e: e.__setitem__((1, 1, 0), -2) or e, "the expert -2"),
        (lambda e: e.__setitem__((1, 1), -1) or e, "of token 1 for some layers, and -1 for others"),
        (lambda e: e.__setitem__((1, 1), 5) or e, r"an expert twice for token 1 in layer 2: \[5, 5\]"),
        (lambda e: e.__setitem__(-1, e[0]) or e, "of the last token, which no forward pass has read"),
    ],
)
def test_experts_that_no_router_can_have_chosen(edit, message):
    assert check_routed_experts("E", experts_of(4, 0).astype(np.int64), 4, ROUTERS).dtype == np.int8
    with pytest.raises(EngineFault, match=f"E, at request r, returned .*{message}"):
        check_routed_experts("E, at request r,", edit(experts_of(4, 0)), 4, ROUTERS)
