"""Judges: what they ask, what they accept as an answer, and what becomes of every failure."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import threading
from types import SimpleNamespace

import pytest
from judge_server import DROP, FAULTS, HANG, Reply, chat, make_judge, said, verdict, verdicts
from rlplug_rewards.judges import Judge
from rlplug_rewards.judges.endpoint import Endpoint, Prices
from rlplug_rewards.judges.verdicts import score_reader
from rlplug_rewards.requests.json_client import RequestError, parsed, retry_after_s

from rlplug.errors import ConfigError
from rlplug.rewards import RewardRunner
from rlplug.types import RewardError

ALONE = SimpleNamespace(gather=list)


def test_a_proxy_of_the_environment_is_asked_where_a_judge_is_told_to(server, template, make_sample, monkeypatch):
    """Alone catches a judge that a cluster cannot reach, one that asks a proxy unasked, and one that says neither."""
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    elsewhere = {"limits": server.endpoint().limits, "use_proxy": True}

    def made(url, **options):
        return Judge(Endpoint(url, "judge", **elsewhere | options), str(template))

    judge = made("http://judge.invalid/v1")
    assert "judge.invalid/v1 through the proxy 127.0.0.1, up to" in judge.notes()[0]
    assert verdicts(judge, make_sample("4"))[0] > 0
    assert server.paths == ["http://judge.invalid/v1/chat/completions"]
    with pytest.raises(ConfigError, match=r"or set Judge.endpoint.use_proxy: the environment names a proxy"):
        made("http://judge.invalid/v1", use_proxy=False).notes()
    monkeypatch.setenv("no_proxy", "judge.invalid")
    with pytest.raises(ConfigError, match=r"judge\.invalid") as refused:
        made("http://judge.invalid/v1").notes()
    assert "proxy" not in str(refused.value)
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1080")
    with pytest.raises(ConfigError, match="http_proxy, whose proxy is not one of HTTP"):
        made("http://judge.invalid/v1")


def test_a_judge_is_asked_and_its_score_is_the_reward(server, template, make_sample):
    judge = make_judge(server, template, system="You grade.", sampling={"temperature": 0.5, "seed": 3})
    assert verdicts(judge, make_sample("4")) == [1 / (1 + len("Task: What is 2 + 2?\nAnswer: 4\nReference: 4"))]
    (asked,) = server.requests
    assert asked["model"] == "judge"
    assert (asked["temperature"], asked["seed"]) == (0.5, 3)
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    schema = asked["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "number", "minimum": 0.0, "maximum": 1.0}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_that_may_pass_is_tried_again(server, template, make_sample, fault):
    server.script = [FAULTS[fault]]
    is_late = fault == "late answer"
    judge = make_judge(server, template, limits={"request_deadline_s": 1.0, "max_retries": 20} if is_late else {})
    (score,) = verdicts(judge, make_sample())
    assert isinstance(score, float)
    counts = judge.pop_counts()
    kinds = {"rate limit": "rate_limited", "dropped connection": "failed_connections", "late answer": "timeouts"}
    found = (counts["requests"], counts["retries"], counts[kinds.get(fault, "server_errors")])
    assert found == (2, 1, 1) or (is_late and found[2] >= 1)  # a busy machine answers late itself
    assert "gave_up" not in counts


def test_retries_end(server, template, make_sample):
    server.script = [FAULTS["rate limit"], DROP, FAULTS["server error"]]
    (error,) = verdicts(make_judge(server, template), make_sample())
    assert error.message.startswith(f"{server.url} answered with status 500: oh no (the last of 3 requests)")


def test_a_deadline_is_over_all_retries(server, template, make_sample):
    server.script = [HANG] * 10
    judge = make_judge(server, template, limits={"deadline_s": 0.5, "request_deadline_s": 0.2})
    (error,) = verdicts(judge, make_sample())
    assert "no usable answer within deadline_s 0.5 s" in error.message


def test_a_wait_beyond_the_deadline_is_not_waited_for(server, template, make_sample):
    server.script = [Reply(b"", 429, headers={"Retry-After": "3600"})]
    judge = make_judge(server, template, limits={"deadline_s": 29})
    (error,) = verdicts(judge, make_sample())
    assert "deadline_s 29 s; before that" in error.message
    assert "status 429" in error.message


@pytest.mark.parametrize(("value", "seconds"), [("3", 3), ("-1", 0), ("nan", None), ("soon", None), (None, None)])
def test_retry_after(value, seconds):
    assert retry_after_s(value) == seconds


def test_retry_after_a_date():
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after_s("Wed, 21 Oct 2415 07:28:00 GMT") > 1e9


HOSTILE = {
    "NaN": (verdict('{"reason": "", "score": NaN}'), "NaN is not JSON"),
    "infinity": (verdict('{"reason": "", "score": 1e999}'), "no finite number"),
    "out of range": (verdict('{"reason": "", "score": 2}'), "not from 0 to 1"),
    "true": (verdict('{"reason": "", "score": true}'), "no number"),
    "a text": (verdict('{"reason": "", "score": "1"}'), "no number"),
    "two scores": (verdict('{"score": 0, "score": 1}'), "twice"),
    "another key": (verdict('{"score": 1, "extra": 1}'), "alone"),
    "prose": (verdict("I would say 1."), "malformed"),
    "prose around": (verdict('Sure: {"score": 1}'), "malformed"),
    "brackets": (verdict("[" * 100_000), "malformed"),
    "cut": (Reply(chat('{"reason": "", "score": 1}', "length")), "raise endpoint.sampling.max_tokens"),
    "no text": (Reply(chat(None)), "no text"),
    "a refusal": (Reply(chat(None, message={"refusal": "no"})), "no text"),
    "no choice": (Reply(b'{"choices": []}'), "no single choice"),
    "a list": (Reply(b"[]"), "no single choice"),
    "NaN outside": (Reply(b'{"choices": NaN}'), "not JSON"),
    "half": (Reply(b'{"choices": ['), "not JSON"),
    "no UTF-8": (Reply(b"\xff\xfe"), "not JSON"),
    "a page": (Reply(b"<html>", headers={"Content-Type": "text/html"}), "text/html"),
    "huge": (Reply(b" " * (5 << 20)), "more than 4 MiB"),
    "compressed": (Reply(gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}), "compressed"),
    "redirect": (Reply(b"", 307, headers={"Location": "http://127.0.0.1:1/steal"}), "redirects"),
    "no such model": (Reply(b'{"error": "no such model"}', 404), "status 404 (Not Found): {"),
    "odd status": (Reply(b"", 299), "status 299"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_any_other_answer_is_an_error_at_once(server, template, make_sample, what):
    reply, words = HOSTILE[what]
    server.script = [reply]
    judge = make_judge(server, template)
    (error,) = verdicts(judge, make_sample())
    assert isinstance(error, RewardError)
    assert words in error.message
    assert len(error.message) < 1000
    counts = judge.pop_counts()
    assert (counts["requests"], counts["gave_up"]) == (1, 1)
    assert counts.get("malformed", 0) + counts.get("refused", 0) == 1


@pytest.mark.parametrize(
    ("form", "pattern", "text", "value"),
    [
        ("plain", None, " 7\n", 7.0),
        ("plain", None, "7.5", 7.5),
        ("plain", None, "7/10", None),
        ("plain", None, "1_0", None),
        ("plain", None, "\u0667", None),
        ("plain", None, "nan", None),
        ("plain", None, "11", None),
        ("regex", r"Score: (\S+)", "Well.\nScore: 3", 3.0),
        ("regex", r"Score: (\S+)", "Score: 3 or rather Score: 4", None),
        ("regex", r"Score: (\S+)", "Score: high", None),
        ("regex", r"Score: (\d)?", "Score: ", None),
        ("json", None, '{"score": 1}', 1.0),
        ("json", None, '{"reason": 1, "score": 1}', None),
    ],
)
def test_scores_are_read_strictly(form, pattern, text, value):
    reader = score_reader("Judge", form, pattern, 0, 10)
    if value is not None:
        assert reader.read(text) == value
        return
    with pytest.raises(RequestError, match="malformed"):
        reader.read(text)


@pytest.mark.parametrize("body", [b"1e999", b"[-1e999]", b"NaN", b'{"a": 1, "a": 2}', b"[" * 100_000, b"9" * 5000])
def test_json_that_is_none_is_malformed(body):
    with pytest.raises(RequestError, match="the answer is not JSON"):
        parsed(body)


def test_the_key_is_sent_and_shown_nowhere(server, template, make_sample, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    server.script = [Reply(b"your key sk-secret is wrong", 400), Reply(b"key sk-secret", 500)]
    cache = tmp_path / "cache.sqlite"
    judge = make_judge(server, template, api_key_env="JUDGE_KEY", cache=str(cache))
    notes = judge.notes()
    scores = verdicts(judge, make_sample("1")) + verdicts(judge, make_sample("2"))
    assert set(server.keys) == {"Bearer sk-secret"}
    assert "your key [key] is wrong" in scores[0].message
    shown = f"{notes} {scores} {vars(judge)} {vars(judge.model)} {judge.model.endpoint} {judge.pop_counts()}"
    files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert "sk-secret" not in shown
    assert b"sk-secret" not in files


@pytest.mark.parametrize(
    "url", ["http://10.0.0.7/v1", "http://localhost.evil.example/v1", "http://127.evil.example/v1"]
)
def test_a_key_goes_to_no_other_host_in_clear(template, url):
    """Catches a key on the network, and a name that only looks like this host's."""
    with pytest.raises(
        ConfigError, match=r"the key of JUDGE_KEY would cross the network .* Judge\.endpoint\.plain_http"
    ):
        Judge(Endpoint(url, "judge", "JUDGE_KEY"), str(template))
    Judge(Endpoint(url, "judge", "JUDGE_KEY", plain_http=True), str(template))
    Judge(Endpoint(url, "judge"), str(template))
    Judge(Endpoint(url.replace("http:", "https:"), "judge", "JUDGE_KEY"), str(template))


def test_a_wrong_key_or_address_stops_before_the_run(server, template, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"Judge\.endpoint\.api_key_env is 'JUDGE_KEY', and that environment"):
        make_judge(server, template, api_key_env="JUDGE_KEY").notes()
    server.needs_key = "right"
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with pytest.raises(ConfigError, match="refuses the key of JUDGE_KEY"):
        make_judge(server, template, api_key_env="JUDGE_KEY").notes()
    server.close()
    with pytest.raises(ConfigError, match="cannot be reached"):
        make_judge(server, template).notes()


def test_tokens_and_cost_are_counted(server, template, make_sample):
    judge = make_judge(server, template, prices=Prices(prompt=2.0, completion=30.0))
    runner = RewardRunner([judge])
    runner.score([make_sample("1"), make_sample("2")])
    server.script = [Reply(chat('{"score": 1}', usage={"prompt_tokens": -5, "completion_tokens": True}))]
    runner.score([make_sample("3")])
    counts = {name.removeprefix("reward_counts/judge/"): value for name, value in runner.pop_counts(ALONE).items()}
    assert counts == {
        "answers_without_usage": 1,
        "completion_tokens": 20,
        "cost": pytest.approx((200 * 2 + 20 * 30) / 1e6),
        "prompt_tokens": 200,
        "requests": 3,
    }
    assert set(runner.pop_counts(ALONE).values()) == {0.0}


def test_requests_at_once_are_limited(server, template, make_sample):
    server.gate = threading.Barrier(2)  # two are there at once, or none gets an answer
    judge = make_judge(server, template, limits={"max_concurrency": 2})
    scores = verdicts(judge, *(make_sample(str(n)) for n in range(8)))
    assert all(isinstance(score, float) for score in scores)
    assert server.most_at_once == 2


def test_a_slot_is_free_while_a_request_waits_to_be_tried_again(server, template, make_sample):
    """Alone catches a slot that is held for a server's Retry-After, for which all others waited."""
    server.script = [Reply(b"", 429, headers={"Retry-After": "1"})]
    judge = make_judge(server, template, limits={"max_concurrency": 1})
    assert all(isinstance(score, float) for score in asyncio.run(judge.score([make_sample("a"), make_sample("b")])))
    assert ["Answer: a" in json.dumps(asked) for asked in server.requests] == [True, False, True]


# ---- configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ completion", r"line 1"),
        ("{{ completion }} {{ anwser }}", r"uses 'anwser'\. Did you mean 'answer'"),
        ("{{ prompt }}", "would not see what it judges"),
    ],
)
def test_templates_that_cannot_work_are_refused(tmp_path, text, words):
    path = tmp_path / "judge.jinja"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Judge(Endpoint("http://127.0.0.1:1/v1", "judge"), str(path))


def test_a_template_runs_no_code(server, tmp_path, make_sample):
    path = tmp_path / "judge.jinja"
    path.write_text("{{ completion.__class__.__mro__ }}")
    (error,) = verdicts(make_judge(server, path), make_sample())
    assert "SecurityError" in error.message
    assert server.requests == []


def test_a_value_that_a_template_lacks_is_an_error(server, tmp_path, make_sample):
    path = tmp_path / "judge.jinja"
    path.write_text("{{ completion }} {{ metadata.rubric }}")
    error, score = verdicts(make_judge(server, path), make_sample(), make_sample(rubric="be kind"))
    assert "has no attribute 'rubric'" in error.message
    assert isinstance(score, float)
    assert said(server.requests[0]) == "4 be kind"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "127.0.0.1:8000"}, r"Judge\.endpoint\.url"),
        ({"url": "http://me:secret@host/v1"}, r"user or password"),
        ({"url": "http://host/v1?key=1"}, r"without \? and #"),
        ({"model": ""}, "endpoint.model"),
        ({"sampling": {"n": 2}}, "sets itself"),
        ({"sampling": {"temperature": math.nan}}, "JSON"),
        ({"cache": "c", "cache_mib": 0}, "cache_mib is 0"),
        ({"answer": "regex"}, "a pattern goes with"),
        ({"pattern": "(a)"}, "a pattern goes with"),
        ({"answer": "regex", "pattern": "a"}, "exactly one pair"),
        ({"minimum": 1.0, "maximum": 1.0}, "the lower first"),
    ],
)
def test_options_that_cannot_work_are_refused(template, options, words):
    of_endpoint = {name: options[name] for name in options if name in Endpoint.__dataclass_fields__}
    others = {name: options[name] for name in options if name not in of_endpoint}
    with pytest.raises(ConfigError, match=words) as error:
        Judge(Endpoint(**{"url": "http://127.0.0.1:1/v1", "model": "judge"} | of_endpoint), str(template), **others)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_prices_are_numbers(price):
    with pytest.raises(ConfigError, match="million tokens"):
        Prices(completion=price)


def test_a_deadline_beyond_the_runs_is_refused(server, template):
    judge = make_judge(server, template, limits={"deadline_s": 60.0})
    with pytest.raises(
        ConfigError, match=r"gives a call 60 s, and model\.limits\.reward_deadline_s ends it after 30 s"
    ):
        RewardRunner([judge])
    RewardRunner([judge], deadline_s=60)


def test_json_of_the_request_is_plain(server, template, make_sample):
    """A completion's half of a surrogate pair must not break the request, nor a cache key."""
    (score,) = verdicts(make_judge(server, template), make_sample("\ud800"))
    assert isinstance(score, float)
    assert json.dumps(server.requests)
