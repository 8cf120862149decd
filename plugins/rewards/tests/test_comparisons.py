"""Rewards of whole groups: which samples a call gets, and judges that compare them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from judge_server import Reply, chat, judge_server, said
from rlplug_rewards.judges import BestOfGroup, PairwiseJudge
from rlplug_rewards.judges.comparisons import orders_of, pairs_of
from rlplug_rewards.text import ExactMatch

from rlplug.errors import ConfigError
from rlplug.interfaces import Reward
from rlplug.interfaces.checks.reward_problems import check_group_rewards
from rlplug.rewards import RewardRunner
from rlplug.types import RewardError


class Rank(Reward):
    """The share of the call's samples that are shorter."""

    compares_group = True

    def score(self, samples):
        return [
            sum(len(other.completion) < len(each.completion) for other in samples) / len(samples) for each in samples
        ]


def longer(body):
    """Choose the longer of two, and of equal ones the first: a judge that favours a place."""
    first, second = said(body).split("|")
    winner = "second" if len(second) > len(first) else "first"
    return Reply(chat(json.dumps({"reason": "", "winner": winner})))


def longest(body):
    texts = said(body).split("|")
    return Reply(chat(json.dumps({"reason": "", "best": 1 + max(range(len(texts)), key=lambda i: len(texts[i]))})))


@pytest.fixture
def pairwise(tmp_path):
    path = tmp_path / "pair.jinja"
    path.write_text("{{ first }}|{{ second }}")
    return str(path)


@pytest.fixture
def grouped(tmp_path):
    path = tmp_path / "group.jinja"
    path.write_text("{{ completions | join('|') }}")
    return str(path)


def scores(reward, samples):
    return [sample.rewards[reward.name] for sample in RewardRunner([reward]).score(samples)]


def group_of(make_sample, *texts, group=0):
    return [dataclasses.replace(make_sample(text), group=group) for text in texts]


def test_a_call_gets_the_samples_of_one_prompt_wherever_they_are(make_sample):
    one, two = group_of(make_sample, "a", "aaa", "aa"), group_of(make_sample, "aaaa", "a", group=7)
    mixed = [two[0], one[0], one[1], two[1], one[2]]
    assert scores(Rank(), mixed) == [0.5, 0.0, 2 / 3, 0.0, 1 / 3]
    both = RewardRunner([Rank(), ExactMatch()]).score(mixed)
    assert [dict(sample.rewards)["exactmatch"] for sample in both] == [0.0] * 5
    assert [sample.completion for sample in both] == [sample.completion for sample in mixed]


def test_a_failure_of_one_group_is_its_own(make_sample):
    class Picky(Rank):
        def score(self, samples):
            return super().score(samples)[: 1 if samples[0].group else None]

    found = scores(Picky(), group_of(make_sample, "a", "b") + group_of(make_sample, "a", "b", group=1))
    assert [isinstance(each, RewardError) for each in found] == [False, False, True, True]


def test_groups_of_one_are_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"'rank' compares .* model\.batch\.group_size is 1"):
        check_group_rewards([Rank()], 1, None)
    with pytest.raises(ConfigError, match=r"model\.validation\.num_samples is 1"):
        check_group_rewards([ExactMatch(), Rank()], 8, 1)
    check_group_rewards([Rank()], 8, 2)
    check_group_rewards([Rank()], 8, None)
    check_group_rewards([ExactMatch()], 1, 1)


def test_pairs_are_shown_in_both_orders(make_sample, pairwise):
    with judge_server(longer) as server:
        judge = PairwiseJudge(server.endpoint(), pairwise)
        found = scores(judge, group_of(make_sample, "aaa", "a", "bb", "aa", "aaa"))
    # four different texts: "aa" and "bb" are a tie, since the judge says "first" in both orders
    assert found == pytest.approx([1.0, 0.0, 0.5, 0.5, 1.0])
    assert len(server.requests) == 12
    assert {tuple(sorted(said(body).split("|"))) for body in server.requests} == {
        *[("a", "aa"), ("a", "aaa"), ("a", "bb"), ("aa", "aaa"), ("aa", "bb"), ("aaa", "bb")]
    }
    counts = judge.pop_counts()
    assert (counts["comparisons"], counts["swayed_by_order"]) == (6, 1)


def test_comparisons_that_fail_are_no_losses(make_sample, pairwise):
    def fails_of_long(body):
        return Reply(chat("?")) if "aaa" in said(body) else longer(body)

    with judge_server(fails_of_long) as server:
        judge = PairwiseJudge(server.endpoint(), pairwise)
        longest_one, *others = scores(judge, group_of(make_sample, "aaa", "aa", "a", "bb"))
    assert "3 of 3 comparisons failed" in longest_one.message
    assert others == [0.75, 0.0, 0.75]
    assert judge.pop_counts()["failed_comparisons"] == 3


def test_samples_that_cannot_be_compared_are_errors(make_sample, pairwise):
    failed = dataclasses.replace(make_sample("c"), rewards={"environment": RewardError("broke")})
    with judge_server(longer) as server:
        judge = PairwiseJudge(server.endpoint(), pairwise)
        assert "no other sample" in scores(judge, group_of(make_sample, "a"))[0].message
        assert "trajectory failed" in judge_errors(judge, [make_sample("a"), failed])[1].message
        assert scores(judge, group_of(make_sample, "a", "a")) == [0.5, 0.5]
        assert server.requests == []


def judge_errors(judge, samples):
    runner = RewardRunner([judge], has_environment=True)
    samples = [dataclasses.replace(sample, rewards=sample.rewards or {"environment": 1.0}) for sample in samples]
    return [sample.rewards[judge.name] for sample in runner.score(samples)]


def test_the_best_of_a_group_is_voted_for_in_turned_orders(make_sample, grouped):
    with judge_server(longest) as server:
        judge = BestOfGroup(server.endpoint(), grouped, votes=4)
        assert scores(judge, group_of(make_sample, "a", "aaa", "b", "aaa")) == [0.0, 1.0, 0.0, 1.0]
        assert [said(body) for body in server.requests].count("a|aaa|b") == 1
        assert len(server.requests) == 4
        places = [said(body).split("|").index("aaa") for body in server.requests]
        assert sorted(places) == [0, 1, 1, 2]
        # the first of equals wins: a favoured place gives each its share of votes, not one of them all
        assert scores(judge, group_of(make_sample, "xx", "yy")) == [0.5, 0.5]


@pytest.mark.parametrize("best", ["3", "0", "-1", "two"])
def test_a_choice_of_nothing_is_an_error(make_sample, grouped, best):
    with judge_server(lambda body: Reply(chat(best))) as server:
        found = scores(BestOfGroup(server.endpoint(), grouped, "plain"), group_of(make_sample, "a", "b"))
    assert all("2 of 2 comparisons failed" in error.message for error in found)


def test_each_has_its_number_of_opponents():
    assert len(pairs_of(8, None)) == 28
    pairs = pairs_of(8, 4)
    assert len(set(map(frozenset, pairs))) == 16
    assert {sum(index in pair for pair in pairs) for index in range(8)} == {4}
    assert pairs_of(3, 4) == pairs_of(3, None)


def test_orders_show_each_place_to_each():
    orders = orders_of(4, 8)
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert {order[0] for order in orders} == {0, 1, 2, 3}
    assert orders[1] == orders[0][::-1]


@pytest.mark.parametrize("opponents", [0, 1, 3])
def test_an_odd_number_of_opponents_is_refused(pairwise, opponents):
    with judge_server(longer) as server, pytest.raises(ConfigError, match="an even number"):
        PairwiseJudge(server.endpoint(), pairwise, opponents=opponents)
