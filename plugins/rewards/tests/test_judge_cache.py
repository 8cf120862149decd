"""Caches of judges' answers: what is asked once, what is not kept, and files that break or are written at once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from judge_server import Reply, make_judge, verdict, verdicts
from rlplug_rewards.requests.answer_cache import AnswerCache

from rlplug.errors import ConfigError
from rlplug.types import RewardError


def test_equal_questions_at_once_are_one_request(server, template, make_sample, tmp_path):
    """Alone catches eight requests for eight equal completions, and a failure of one that ends none of the others."""
    judge = make_judge(server, template, cache=str(tmp_path / "judge.sqlite"))
    scores = asyncio.run(judge.score([make_sample("same") for _ in range(8)]))
    assert len(server.requests) == 1
    assert len(set(scores)) == 1
    server.script = [Reply(b"no", 400)]
    errors = asyncio.run(judge.score([make_sample("other") for _ in range(8)]))
    assert len(server.requests) == 2
    assert len({error.message for error in errors}) == 1


def test_a_kept_answer_that_is_refused_now_is_asked_for_again(server, template, make_sample, tmp_path):
    """Alone catches a range that was corrected, after which each kept answer failed its sample for good."""
    server.reply = lambda body: verdict("3")
    options = {"cache": str(tmp_path / "judge.sqlite"), "answer": "plain"}
    assert verdicts(make_judge(server, template, maximum=5.0, **options), make_sample()) == [3.0]
    server.reply = lambda body: verdict("2")
    assert verdicts(make_judge(server, template, maximum=2.0, **options), make_sample()) == [2.0]
    assert len(server.requests) == 2


def test_an_answer_is_asked_for_once(server, template, make_sample, tmp_path):
    options = {"cache": str(tmp_path / "judge.sqlite")}
    first = verdicts(make_judge(server, template, **options), make_sample())
    judge = make_judge(server, template, **options)
    assert verdicts(judge, make_sample()) == first
    assert len(server.requests) == 1
    assert judge.pop_counts() == {"cache_hits": 1}
    for other in ({"sampling": {"temperature": 1.0}}, {"system": "Grade."}, {"answer": "plain"}):
        verdicts(make_judge(server, template, **options | other), make_sample())
    template.write_text("{{ completion }}")
    verdicts(make_judge(server, template, **options), make_sample())
    assert len(server.requests) == 5


def test_malformed_answers_are_not_kept(server, template, make_sample, tmp_path):
    options = {"cache": str(tmp_path / "judge.sqlite")}
    server.script = [verdict("hm")]
    (error,) = verdicts(make_judge(server, template, **options), make_sample())
    assert isinstance(error, RewardError)
    assert isinstance(verdicts(make_judge(server, template, **options), make_sample())[0], float)


def test_a_cache_stays_within_its_size(tmp_path):
    cache = AnswerCache(str(tmp_path / "cache"), 1, "cache")
    for number in range(600):
        cache.put(number.to_bytes(32, "big"), "x" * 4000)
    assert (tmp_path / "cache").stat().st_size <= 1 << 20
    assert cache.get((599).to_bytes(32, "big")) == "x" * 4000
    assert cache.get((0).to_bytes(32, "big")) is None
    with cache._connected() as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_ranks_make_a_cache_at_once(tmp_path):
    """SQLite does not wait for those that switch a new file to its write-ahead log: one start in 20 failed."""

    def make(number: int) -> None:
        begin.wait()
        AnswerCache(str(tmp_path / str(number)), 1, "cache").open()

    num_ranks = 8
    begin = threading.Barrier(num_ranks)
    with ThreadPoolExecutor(num_ranks) as ranks:
        for number in range(60):
            list(ranks.map(make, [number] * num_ranks))


def test_several_write_a_cache_at_once(tmp_path):
    caches = [AnswerCache(str(tmp_path / "cache"), 1, "cache") for _ in range(4)]

    def write(cache, first):
        for number in range(first, first + 25):
            cache.put(number.to_bytes(32, "big"), str(number))

    threads = [threading.Thread(target=write, args=(each, 25 * index)) for index, each in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [caches[0].get(number.to_bytes(32, "big")) for number in range(100)] == [str(n) for n in range(100)]


@pytest.mark.parametrize("content", [b"no database " * 100, None])
def test_what_is_no_cache_is_refused(server, template, tmp_path, content):
    path = tmp_path / "file"
    if content is None:
        path = tmp_path / "missing" / "file"
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"Judge\.endpoint\.cache is .* which cannot be used"):
        make_judge(server, template, cache=str(path)).notes()
    assert content is None or path.read_bytes() == content


def test_a_cache_that_breaks_costs_requests_and_is_said(server, template, make_sample, tmp_path):
    path = tmp_path / "cache"
    judge = make_judge(server, template, cache=str(path))
    path.write_bytes(b"no database " * 100)
    with pytest.warns(UserWarning, match=r"cache .* failed"):
        (score,) = verdicts(judge, make_sample())
    assert isinstance(score, float)
    assert judge.pop_counts()["cache_errors"] == 2
