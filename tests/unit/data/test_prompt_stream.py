import hashlib
import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlplug.data.prompt_stream import PromptStream, require_same_prompts
from rlplug.errors import ConfigError, RunError
from rlplug.types import Prompt


def numbered_prompts(num_prompts: int) -> list[Prompt]:
    return [Prompt(f"p{index}", (index, index + 1), str(index)) for index in range(num_prompts)]


@given(
    num_prompts=st.integers(1, 7),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    before=st.lists(st.integers(0, 20), max_size=4),
    after=st.lists(st.integers(0, 20), max_size=4),
)
def test_resumed_stream_equals_the_undisturbed_one(num_prompts, seed, shuffle, before, after):
    prompts = numbered_prompts(num_prompts)
    whole = PromptStream(prompts, shuffle, seed).take(sum(before) + sum(after))
    first = PromptStream(prompts, shuffle, seed)
    taken = [prompt for count in before for prompt in first.take(count)]
    second = PromptStream(prompts, shuffle, seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert taken + [prompt for count in after for prompt in second.take(count)] == whole


@given(num_prompts=st.integers(1, 9), seed=st.integers(0, 1000), num_epochs=st.integers(1, 3))
def test_each_epoch_has_each_prompt_once(num_prompts, seed, num_epochs):
    prompts = numbered_prompts(num_prompts)
    taken = PromptStream(prompts, seed=seed).take(num_epochs * num_prompts)
    for epoch in range(num_epochs):
        part = taken[epoch * num_prompts : (epoch + 1) * num_prompts]
        assert sorted(prompt.uid for prompt in part) == sorted(prompt.uid for prompt in prompts)


def test_unshuffled_stream_repeats_the_source():
    assert [prompt.text for prompt in PromptStream(numbered_prompts(3), shuffle=False).take(7)] == list("0120120")


def test_shuffled_orders_differ_between_epochs_and_seeds():
    prompts = numbered_prompts(50)
    orders = [tuple(prompt.uid for prompt in PromptStream(prompts, seed=seed).take(150)) for seed in (0, 1)]
    epochs = [order[start : start + 50] for order in orders for start in (0, 50, 100)]
    assert len(set(epochs)) == 6
    assert tuple(prompt.uid for prompt in prompts) not in epochs


def test_stream_neither_reads_nor_moves_the_global_generator():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = PromptStream(numbered_prompts(20)).take(50)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert PromptStream(numbered_prompts(20)).take(50) == first


@pytest.mark.nightly
def test_stream_is_the_same_in_another_process():
    # hash() of strings differs between processes, and RANK between ranks
    code = (
        "from rlplug.data.prompt_stream import PromptStream; from rlplug.types import Prompt; import hashlib, json\n"
        "stream = PromptStream([Prompt(f'p{i}', (i, i + 1), str(i)) for i in range(20)], seed=3)\n"
        "uids = [p.uid for p in stream.take(30)]\n"
        "print(hashlib.sha256(json.dumps([uids, stream.state_dict()]).encode()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_rank_1())
    stream = PromptStream(numbered_prompts(20), seed=3)
    uids = [prompt.uid for prompt in stream.take(30)]
    expected = hashlib.sha256(json.dumps([uids, stream.state_dict()]).encode()).hexdigest()
    assert other.stdout.strip() == expected


def _rank_1() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(sys.path), "RANK": "1", "LOCAL_RANK": "1", "PYTHONHASHSEED": "7"}


@pytest.mark.parametrize(
    ("prompts", "options", "named"),
    [
        (numbered_prompts(4), {}, "the number of prompts (data.train, or what data.too_long leaves of it): 5 then, 4"),
        (numbered_prompts(5)[::-1], {}, "the names or the order of the prompts (data.train)"),
        ([Prompt(p.uid, (9,), p.text) for p in numbered_prompts(5)], {}, "the tokens of the prompts"),
        (numbered_prompts(5), {"seed": 1}, "data.seed: 0 then, 1 now"),
        (numbered_prompts(5), {"shuffle": False}, "data.shuffle: True then, False now"),
    ],
)
def test_resuming_on_other_prompts(prompts, options, named):
    state = PromptStream(numbered_prompts(5)).state_dict()
    with pytest.raises(ConfigError) as caught:
        PromptStream(prompts, **options).load_state_dict(state)
    assert f"What changed is {named}" in str(caught.value)


LOOP: list[object] = []
LOOP.append(LOOP)


@pytest.mark.parametrize("answer", ["5", None, {"a": {1, 2}}, object(), b"x", LOOP, "\ud800", 10**5000], ids=type)
def test_other_answers_are_said_and_the_same_are_not(answer, recwarn):
    prompts = [Prompt("a", (1, 2), "", answer=answer, metadata={"b": 1})]
    state = PromptStream(prompts).state_dict()
    PromptStream([Prompt("a", (1, 2), "", answer=answer, metadata={"b": 1})]).load_state_dict(state)
    assert not recwarn
    with pytest.warns(UserWarning, match="other answers or metadata"):
        PromptStream([Prompt("a", (1, 2), "", answer="6", metadata={"b": 1})]).load_state_dict(state)


def test_token_ids_are_fingerprinted_prompt_by_prompt():
    # the same tokens, cut in another place
    first = PromptStream([Prompt("a", (1, 2), ""), Prompt("b", (3,), "")]).state_dict()
    with pytest.raises(ConfigError, match="the tokens of the prompts"):
        PromptStream([Prompt("a", (1,), ""), Prompt("b", (2, 3), "")]).load_state_dict(first)


def test_seed_means_nothing_without_shuffle():
    stream = PromptStream(numbered_prompts(5), shuffle=False, seed=0)
    stream.take(3)
    other = PromptStream(numbered_prompts(5), shuffle=False, seed=1)
    other.load_state_dict(stream.state_dict())
    assert other.take(1)[0].uid == "p3"


def test_ranks_that_read_different_prompts_end_the_run() -> None:
    prompts = [Prompt("a", (1, 2), "")]
    require_same_prompts(prompts, lambda items: items * 2, step=3)
    with pytest.raises(RunError, match="step 3: the ranks read different prompts"):
        require_same_prompts(prompts, lambda items: [*items, "other"], step=3)


def test_a_new_pass_begins_over_other_prompts_where_they_may_differ() -> None:
    """Alone catches a run with an added row that cannot be resumed, or goes on at a place that means nothing."""
    former = PromptStream(numbered_prompts(5), seed=3)
    former.take(7)
    stream, fresh = PromptStream(numbered_prompts(6), seed=3), PromptStream(numbered_prompts(6), seed=3)
    with pytest.raises(ConfigError, match=r"5 then, 6 now.*--run.allow_changes '\[data\]'"):
        stream.load_state_dict(former.state_dict())
    stream.may_differ = True
    with pytest.warns(UserWarning, match=r"A new pass over the prompts begins.*5 then, 6 now"):
        stream.load_state_dict(former.state_dict())
    fresh.take(12)  # the passes of the former run
    assert stream.state_dict() == fresh.state_dict()
    assert [prompt.uid for prompt in stream.take(6)] == [prompt.uid for prompt in fresh.take(6)]
