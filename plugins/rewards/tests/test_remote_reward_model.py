"""Reward models behind a server: what is sent, which answers are scores, and what becomes of all others."""

from __future__ import annotations

import dataclasses
import json

import pytest
from judge_server import DROP, FAULTS, Reply
from reward_server import NAME, TEMPLATE, TINY_MODEL, RewardReplies, card, remote, reward_server, score_of, sglang, vllm
from transformers import AutoTokenizer

from rlplug.errors import ConfigError
from rlplug.rewards import RewardRunner
from rlplug.types import RewardError

TEXTS = ("2", "123+456", "", "1" * 20, "7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def replies():
    return RewardReplies()


@pytest.fixture
def server(replies):
    with reward_server(replies) as made:
        yield made


@pytest.fixture
def samples(make_sample):
    prompt = dataclasses.replace(make_sample().prompt, text="2+2")
    return [dataclasses.replace(make_sample(text), prompt=prompt) for text in TEXTS]


def scores(reward, samples):
    return [sample.rewards[reward.name] for sample in RewardRunner([reward]).score(samples)]


def in_turn(body):
    """Answer as vLLM does, the last row first; each says which one it is."""
    return vllm(body) | {"data": vllm(body)["data"][::-1]}


@pytest.mark.parametrize(
    ("answer", "kind", "max_tokens"), [(vllm, "vllm", 16384), (in_turn, "vllm", 40), (sglang, "sglang", 40)]
)
def test_token_ids_are_sent_and_each_sample_gets_its_score(
    server, replies, folder, samples, answer, kind, max_tokens, monkeypatch
):
    monkeypatch.setenv("REWARD_KEY", "sk-secret")
    replies.answer = answer
    reward = remote(server, folder, server=kind, max_tokens=max_tokens, api_key_env="REWARD_KEY")
    (note,) = reward.notes()
    assert f"{NAME} at {server.url.removesuffix('/v1')} ({kind}), conversations of up to 64 tokens" in note
    server.requests.clear()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(f"2+2={text}={tokenizer.eos_token}", add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert scores(reward, samples) == [score_of(row) for row in rows]
    sent = [row for body in server.requests for row in body["input" if kind == "vllm" else "input_ids"]]
    assert sorted(sent) == sorted(rows)
    assert {"/classify", "/tokenize"} == set(server.paths)
    assert set(server.keys) == {"Bearer sk-secret"}
    assert reward.pop_counts() == {"requests": len(server.requests), "prompt_tokens": sum(map(len, rows))}
    assert (len(server.requests) > 1) == (max_tokens == 40)
    assert "sk-secret" not in f"{note} {vars(reward)} {vars(reward.server)}"


def test_what_a_server_cannot_take_is_an_error_of_its_sample_alone(server, folder, samples):
    long = dataclasses.replace(samples[0], completion="1" * 100)
    for options, limit in (({}, 64), ({"max_length": 9}, 9)):
        first, error = scores(remote(server, folder, **options), [samples[0], long])
        assert isinstance(first, float)
        assert error.message.endswith(f"tokens; the reward model takes 1 to {limit}")
    assert all(len(row) <= 64 for body in server.requests for row in body.get("input", []))


def changed(position, **fields):
    """Answer as vLLM does, but for fields of one score."""

    def answer(body):
        right = vllm(body)
        right["data"][position] |= fields
        return right

    return answer


def infinite(body):
    return json.dumps(changed(0, probs=["infinity"])(body)).encode().replace(b'"infinity"', b"1e999")


HOSTILE = {
    "a score less": (lambda body: vllm(body, data=vllm(body)["data"][1:]), "1 scores for 2 rows"),
    "a score more": (lambda body: vllm(body, data=vllm(body)["data"] * 2), "4 scores for 2 rows"),
    "a row twice": (changed(1, index=0), "stands twice"),
    "a row that was not sent": (changed(1, index=2), "none of 2 rows"),
    "no index": (changed(1, index=True), "none of 2 rows"),
    "two labels": (changed(0, probs=[0.5, 0.5]), "gives 2 numbers for a conversation"),
    "no label": (changed(0, probs=[]), "no list of numbers"),
    "a number for each token": (changed(0, probs=[[0.5], [0.5]]), "no list of numbers"),
    "a text": (changed(0, probs=["1"]), "no list of numbers"),
    "true": (changed(0, probs=[True]), "no list of numbers"),
    "a huge integer": (changed(0, probs=[10**400]), "its size must be"),
    "infinity": (infinite, "no finite number"),
    "NaN": (changed(1, probs=[float("nan")]), "NaN is not JSON"),
    "another model": (lambda body: vllm(body, model="base"), "is of the model str 'base', not of 'reward-model'"),
    "cut rows": (lambda body: vllm(body, usage={"prompt_tokens": 3}), "has read int 3 tokens, and"),
    "no usage": (lambda body: vllm(body, usage=None), "has read NoneType None tokens"),
    "a list": (lambda body: [], "no object"),
    "half": (lambda body: b'{"model": ', "not JSON"),
    "endless": (lambda body: b" " * (5 << 20), "more than 4 MiB"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_any_other_answer_is_an_error_of_its_samples(server, replies, folder, samples, what):
    reward = remote(server, folder)
    reward.notes()
    replies.answer, words = HOSTILE[what]
    errors = scores(reward, samples[:2])
    assert all(isinstance(error, RewardError) and words in error.message for error in errors)
    assert all(len(error.message) < 1000 for error in errors)
    assert reward.pop_counts() == {"requests": 1, "malformed": 1, "gave_up": 1, "failed_samples": 2}


def test_what_may_pass_is_tried_again_and_counted(server, folder, samples):
    torn = Reply(b'{"model"', headers={"Content-Length": "100"})
    reward = remote(server, folder, limits={"max_retries": 3})
    reward.notes()
    server.script = [FAULTS["rate limit"], FAULTS["server error"], torn]
    assert all(isinstance(score, float) for score in scores(reward, samples))
    counts = reward.pop_counts()
    assert counts.pop("prompt_tokens") > 0
    assert counts == {"requests": 4, "retries": 3, "rate_limited": 1, "server_errors": 1, "failed_connections": 1}
    server.script = [DROP] * 4
    errors = scores(reward, samples)
    assert all("cannot be reached" in error.message for error in errors)
    counts = reward.pop_counts()
    assert (counts["gave_up"], counts["failed_samples"], counts["failed_connections"]) == (1, len(TEXTS), 4)


def names(*cards):
    return json.dumps({"data": cards}).encode()


def as_sigmoid(body):
    """Answer as a server that does not know ``use_activation``."""
    return vllm(body | {"use_activation": True})


@pytest.mark.parametrize(
    ("models", "answer", "words"),
    [
        (names(card("reward-modell"), card("b")), vllm, r"serves 'reward-modell', 'b'\. Did you mean 'reward-modell'"),
        (names(), vllm, "serves no model"),
        (b'{"data": {}}', vllm, "v1/models gave no answer of .* no list of models"),
        (b"<html>", vllm, "v1/models gave no answer of .* not JSON"),
        (names(card(max_model_len=-1)), vllm, "max_model_len of 'reward-model' is int -1"),
        (names(card()), changed(0, probs=[0.5, 0.5]), "classify gave no answer of .* gives 2 numbers"),
        (names(card()), sglang, "classify gave no answer of .*"),
        (names(card()), as_sigmoid, "may be a sigmoid"),
    ],
)
def test_a_server_of_another_model_stops_before_the_run(server, replies, folder, models, answer, words):
    server.models = models
    replies.answer = answer if answer is not sglang else lambda body: [{"embedding": [1.0]}]
    with pytest.raises(ConfigError, match=words) as error:
        remote(server, folder).notes()
    assert "RemoteRewardModel.endpoint" in str(error.value)


def test_scores_that_are_no_probabilities_need_no_activation(server, replies, folder, samples):
    """A regression model has none; one of the names of a model comes back for all of them."""
    replies.answer = lambda body: vllm(body | {"use_activation": False}, model="first-name")
    server.models = names(card("first-name"), card())
    assert all(isinstance(score, float) for score in scores(remote(server, folder), samples))
    server.models = names(card("first-name", root="/models/other"), card())
    with pytest.raises(ConfigError, match="of the model str 'first-name'"):
        remote(server, folder).notes()


def test_another_tokenizer_stops_before_the_run(server, replies, folder, monkeypatch):
    monkeypatch.setattr(replies, "tokenizer", lambda *_, **__: {"input_ids": [1, 2]})
    with pytest.raises(ConfigError, match=r"RemoteRewardModel\.path has another tokenizer than 'reward-model'"):
        remote(server, folder).notes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "http://127.0.0.1:1/v1/"}, "ends with /v1"),
        ({"url": "127.0.0.1:8000"}, r"RemoteRewardModel\.endpoint\.url"),
        ({"model": ""}, "endpoint.model"),
        ({"max_tokens": 0}, r"RemoteRewardModel\.max_tokens is 0"),
        ({"chat_template": "./none"}, r"RemoteRewardModel\.chat_template"),
    ],
)
def test_options_that_cannot_work_are_refused(server, folder, options, words):
    with pytest.raises(ConfigError, match=words):
        remote(server, folder, **options)
