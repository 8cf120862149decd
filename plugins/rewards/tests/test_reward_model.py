"""Reward models: against a direct call of transformers, one row at a time."""

from __future__ import annotations

import builtins
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from rlplug_rewards.reward_model import RewardModel
from rlplug_rewards.reward_model.classifier import batches_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rlplug.errors import ConfigError
from rlplug.rewards import RewardRunner
from rlplug.types import RewardError

TINY_MODEL = Path(__file__).parents[3] / "tests/model"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}={% endfor %}{{ eos_token }}"
TEXTS = ("1+1", "2", "123+456", "", "1" * 20, "7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("reward-model")
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.pad_token = tokenizer.eos_token  # as many have it
    tokenizer.save_pretrained(made)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_labels=1, max_position_embeddings=64, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(made)
    return made


@pytest.fixture
def samples(make_sample):
    prompt = dataclasses.replace(make_sample().prompt, text="2+2", metadata={"question": "3+3"})
    return [dataclasses.replace(make_sample(text), prompt=prompt) for text in TEXTS]


def reward_of(folder, **options):
    return RewardModel(str(folder), **{"dtype": "float32"} | options)


def scores(reward, samples):
    return [sample.rewards["rewardmodel"] for sample in RewardRunner([reward]).score(samples)]


@pytest.mark.parametrize("max_tokens", [1, 40, 16384])
@pytest.mark.parametrize("read", ["text", "field", "messages"])
def test_scores_are_those_of_the_model_alone(folder, samples, max_tokens, read):
    if read == "messages":  # the text has the policy's template around it
        chat = dataclasses.replace(
            samples[0].prompt, text="<user>2+2<end>", messages=[{"role": "user", "content": "2+2"}]
        )
        samples = [dataclasses.replace(sample, prompt=chat) for sample in samples]
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = []
    for sample in samples:
        question = "3+3" if read == "field" else "2+2"
        ids = tokenizer(f"{question}={sample.completion}={tokenizer.eos_token}", add_special_tokens=False)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id
        hidden = network.model(torch.tensor([ids])).last_hidden_state[0, -1]  # the last token, whatever it is
        wanted.append(network.score(hidden).item())
    prompt_key = "question" if read == "field" else None
    found = scores(reward_of(folder, max_tokens=max_tokens, prompt_key=prompt_key), samples)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert len(set(wanted)) == len(TEXTS)


def test_batches_keep_their_budget():
    lengths = [5, 1, 9, 3, 3, 30]
    batches = batches_of(lengths, 12)
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    assert all(len(batch) * max(lengths[index] for index in batch) <= 12 or len(batch) == 1 for batch in batches)
    assert len(batches) == 4


def test_what_cannot_be_scored_is_an_error_of_its_sample(folder, samples, make_sample):
    long = dataclasses.replace(samples[0], completion="1" * 100)
    no_question = make_sample("1")
    found = scores(reward_of(folder, prompt_key="question"), [samples[0], long, no_question])
    assert isinstance(found[0], float)
    assert "tokens; the reward model takes 1 to 64" in found[1].message
    assert "'question' is neither" in found[2].message


def test_nan_is_an_error(folder, samples, tmp_path):
    shutil.copytree(folder, tmp_path / "nan")
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    network.score.weight.data[:] = float("nan")
    network.save_pretrained(tmp_path / "nan")
    assert all("score is nan" in error.message for error in scores(reward_of(tmp_path / "nan"), samples))


def test_a_deadline_leaves_errors(folder, samples):
    found = scores(reward_of(folder, deadline_s=1e-9), samples)
    assert all("RewardModel.deadline_s" in error.message for error in found)
    assert all(isinstance(error, RewardError) for error in found)


def test_a_model_of_other_labels_or_without_a_head_is_refused(folder, tmp_path):
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    network.model.save_pretrained(tmp_path / "trunk")
    with pytest.raises(ConfigError, match="a LlamaModel: give a sequence classifier"):
        reward_of(tmp_path / "trunk").notes()
    AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=2, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path / "two")
    with pytest.raises(ConfigError, match="which has 2 labels"):
        reward_of(tmp_path / "two").notes()
    with pytest.raises(ConfigError, match="cannot be read"):
        reward_of(tmp_path / "none").notes()


class MakesFolder:
    """Runs code of its own when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickles_and_code_of_a_model_are_not_run(folder, tmp_path, monkeypatch):
    """Catches weights that are programs, and a question on the terminal that ``yes |`` answers."""
    shutil.copytree(folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save({"score.weight": MakesFolder(tmp_path / "ran")}, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"which cannot be loaded: .*safetensors"):
        reward_of(tmp_path / "pickled").notes()
    shutil.copytree(folder, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "own.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    monkeypatch.setattr(builtins, "input", lambda _: "yes")
    with pytest.raises(ConfigError, match="needs code of its own"):
        reward_of(tmp_path / "own").notes()
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_grows_texts_without_bound_is_refused(folder, tmp_path):
    """Catches a tokenizer that is read without limits: the hook of a run's own tokenizers does not see this one."""
    shutil.copytree(folder, tmp_path / "grows")
    file = tmp_path / "grows" / "tokenizer.json"
    step = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
    grown = {"normalizer": {"type": "Sequence", "normalizers": [step] * 20}}
    file.write_text(json.dumps(json.loads(file.read_text()) | grown))
    with pytest.raises(ConfigError, match=r"it may make a text 1.05e\+06 times as long"):
        reward_of(tmp_path / "grows").notes()


def test_missing_weights_are_no_random_scores(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "headless")
    network = AutoModelForSequenceClassification.from_pretrained(folder)
    state = {name: value for name, value in network.state_dict().items() if name != "score.weight"}
    network.save_pretrained(tmp_path / "headless", state_dict=state)
    with pytest.raises(ConfigError, match=r"lack \['score\.weight'\] in this model's shape: scores would be random"):
        reward_of(tmp_path / "headless").notes()


def test_notes_and_bytes(folder):
    reward = reward_of(folder)
    num_bytes = 4 * sum(p.numel() for p in AutoModelForSequenceClassification.from_pretrained(folder).parameters())
    assert reward.device_bytes() == (num_bytes, False)
    assert reward_of(folder, offload=False).device_bytes() == (num_bytes, True)
    assert reward_of(folder, device="cuda:1").device_bytes() == (0, False)
    assert "in float32 on cpu" in reward.notes()[0]
