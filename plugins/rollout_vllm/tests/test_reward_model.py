"""A reward model behind vLLM's own server, on the CPU, beside the same model in this process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rlplug_devkit import make_sample
from rlplug_rewards.requests.json_client import RequestError
from rlplug_rewards.requests.limits import RequestLimits
from rlplug_rewards.reward_model import RemoteRewardModel, RewardModel
from rlplug_rewards.reward_model.endpoint import RewardEndpoint
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from vllm_api import KEY, SMOLLM2, vllm_api

from rlplug.errors import ConfigError
from rlplug.rewards import RewardRunner

pytestmark = pytest.mark.nightly
LONGEST = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward-model")
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.save_pretrained(made)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_labels=1, max_position_embeddings=LONGEST, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ["--runner", "pooling", "--dtype", "float32", "--max-num-seqs", "8", "--enforce-eager"]
    with vllm_api(folder, "reward-model", tmp_path_factory.mktemp("vllm"), *options) as address:
        yield address


@pytest.fixture
def endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> RewardEndpoint:
    monkeypatch.setenv("REWARD_KEY", KEY)
    limits = RequestLimits(request_deadline_s=300, deadline_s=600, max_concurrency=4)
    return RewardEndpoint(url, "reward-model", api_key_env="REWARD_KEY", limits=limits)


def scores(reward: RewardModel | RemoteRewardModel, texts: list[str]) -> list:
    samples = [make_sample(text, prompt="What is 2 + 2?") for text in texts]
    return [sample.rewards[reward.name] for sample in RewardRunner([reward], deadline_s=600).score(samples)]


def test_scores_are_those_of_the_local_model(folder: Path, endpoint: RewardEndpoint) -> None:
    texts = [
        "4",
        "",
        "five",
        "It is 4.<|im_end|>",
        "2 + 2 = 4, naïve, 東京 " * 8,
        *(f"{n} or {n * n}" for n in range(40)),
    ]
    remote = RemoteRewardModel(str(folder), endpoint, max_tokens=512)
    (note,) = remote.notes()
    assert f"conversations of up to {LONGEST} tokens" in note
    wanted = scores(RewardModel(str(folder), dtype="float32"), texts)
    found = scores(remote, texts)
    print("largest difference:", max(abs(one - other) for one, other in zip(found, wanted, strict=True)))
    assert found == pytest.approx(wanted, abs=1e-3)
    assert min(wanted) < 0 or max(wanted) > 1, "no activation would be seen otherwise"
    assert len(set(wanted)) == len(texts)
    counts = remote.pop_counts()
    assert counts.keys() == {"requests", "prompt_tokens"}
    assert 1 < counts["requests"] < len(texts)
    assert scores(remote, texts) == pytest.approx(wanted, abs=1e-3), "from the prefix cache too"


def test_a_server_refuses_what_is_too_long_and_so_does_the_reward(folder: Path, endpoint: RewardEndpoint) -> None:
    remote = RemoteRewardModel(str(folder), endpoint)
    first, error = scores(remote, ["4", "1 " * LONGEST])
    assert isinstance(first, float)
    assert error.message.endswith(f"the reward model takes 1 to {LONGEST}")
    (score,) = asyncio.run(remote.server.scores([[5] * LONGEST], {"reward-model"}))
    assert isinstance(score, float)
    with pytest.raises(RequestError, match="status 400"):
        asyncio.run(remote.server.scores([[5] * (LONGEST + 1)], {"reward-model"}))


def test_a_wrong_model_key_or_tokenizer_is_refused(
    folder: Path, endpoint: RewardEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="serves 'reward-model'"):
        RemoteRewardModel(str(folder), dataclasses.replace(endpoint, model="base")).notes()
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "tests/model")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="another tokenizer"):
        RemoteRewardModel(str(tmp_path), endpoint).notes()
    monkeypatch.setenv("REWARD_KEY", "wrong")
    with pytest.raises(ConfigError, match="refuses the key of REWARD_KEY"):
        RemoteRewardModel(str(folder), endpoint).notes()
