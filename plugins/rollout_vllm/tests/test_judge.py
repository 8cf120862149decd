"""Judges against vLLM's own OpenAI server, on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlplug_devkit import make_sample
from rlplug_rewards.judges import BestOfGroup, Judge, PairwiseJudge
from rlplug_rewards.judges.endpoint import Endpoint
from rlplug_rewards.requests.limits import RequestLimits
from vllm_api import KEY, SMOLLM2, vllm_api

from rlplug.errors import ConfigError
from rlplug.rewards import RewardRunner

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
    with vllm_api(SMOLLM2, "smollm2", tmp_path_factory.mktemp("vllm"), *options) as address:
        yield f"{address}/v1"


@pytest.fixture
def endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    limits = RequestLimits(request_deadline_s=300, deadline_s=600, max_concurrency=8)
    return Endpoint(url, "smollm2", "JUDGE_KEY", sampling={"temperature": 0.0, "max_tokens": 200}, limits=limits)


def template(tmp_path: Path, text: str) -> str:
    (tmp_path / "prompt.jinja").write_text(text)
    return str(tmp_path / "prompt.jinja")


def samples() -> list:
    made = [make_sample(text, prompt="2 + 2 =") for text in ("4", "five", "I do not know", "4")]
    return [dataclasses.replace(sample, group=0) for sample in made]


def rewards(reward) -> list:
    return [sample.rewards[reward.name] for sample in RewardRunner([reward], deadline_s=600).score(samples())]


def test_a_schema_makes_the_smallest_model_a_judge(endpoint: Endpoint, tmp_path: Path) -> None:
    text = "Grade the answer {{ completion }} to {{ prompt }} from 0 to 10, with a short reason, as JSON."
    judge = Judge(endpoint, template(tmp_path, text), maximum=10)
    assert "smollm2 at" in judge.notes()[0]
    found = rewards(judge)
    counts = judge.pop_counts()
    assert counts["requests"] == 4
    assert counts["prompt_tokens"] > 100
    numbers = [value for value in found if isinstance(value, float)]
    errors = [value for value in found if not isinstance(value, float)]
    # the schema is enforced, but not that the answer ends within max_tokens, nor a number's range
    assert len(numbers) >= 1, errors
    assert all(0 <= number <= 10 for number in numbers)
    assert len(errors) == counts.get("malformed", 0)


def test_choices_are_enforced(endpoint: Endpoint, tmp_path: Path) -> None:
    text = "Which answer to {{ prompt }} is better, the first or the second?\n1: {{ first }}\n2: {{ second }}"
    pairwise = PairwiseJudge(endpoint, template(tmp_path, text))
    found = rewards(pairwise)
    counts = pairwise.pop_counts()
    assert counts["requests"] == 6
    assert counts.get("comparisons", 0) + counts.get("failed_comparisons", 0) == 3
    assert found[0] == found[3]
    best = BestOfGroup(endpoint, template(tmp_path, "Best answer to {{ prompt }}, as a number: {{ completions }}"))
    rewards(best)
    assert best.pop_counts()["requests"] == 2


def test_a_wrong_key_and_model_are_named(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = template(tmp_path, "{{ completion }}")
    (error, *_) = rewards(Judge(dataclasses.replace(endpoint, model="other"), path))
    assert "status 404" in error.message
    assert "other" in error.message
    monkeypatch.setenv("JUDGE_KEY", "wrong")
    with pytest.raises(ConfigError, match="refuses the key of JUDGE_KEY"):
        Judge(endpoint, path).notes()
