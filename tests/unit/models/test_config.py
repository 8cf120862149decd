"""The policy's tokenizer and export. Loading is in test_policy_loading.py, forward passes in test_forward.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlplug.errors import ConfigError
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.models.export import export_policy
from rlplug.models.transformers_trainer import TRANSFORMERS


def test_a_folder_that_gives_no_tokenizer_is_named_with_what_it_lacks(model_folder, tmp_path):
    """Alone catches the first lines of transformers' own message, which end within a sentence."""
    folder = Path(shutil.copytree(model_folder("llama"), tmp_path / "models" / "llama"))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    for path, reason in (
        (folder, "the folder gives no tokenizer: there is no tokenizer.json, and no other file"),
        (folder.parent, rf"is no model folder: it has no config.json. Did you mean '{folder}'\? Give a folder"),
    ):
        with pytest.raises(ConfigError, match=rf"^model.critic.trunk.path '{path}':? {reason}"):
            load_tokenizer(ModelConfig(path=str(path)), "model.critic.trunk")
    (folder / "tokenizer_config.json").symlink_to("/nowhere/blobs/4d7a")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json is no file, or a link to none: copy the model's"):
        load_tokenizer(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_export_is_a_folder_that_transformers_opens(family, model_folder, load_policy, tmp_path):
    policy = load_policy(model_folder(family))
    with torch.no_grad():
        next(policy.parameters()).add_(0.125)
    tokenizer = load_tokenizer(ModelConfig(path=str(model_folder(family))))
    export_policy(policy, tokenizer, torch.bfloat16, tmp_path / "out", 0, TRANSFORMERS)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in policy.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()


def test_only_rank_zero_writes(model_folder, load_policy, tmp_path):
    export_policy(load_policy(model_folder("llama")), None, torch.bfloat16, tmp_path / "out", 1, TRANSFORMERS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("special", [True, False])
def test_a_special_token_without_an_embedding_is_accepted(special, tmp_path):
    """As of gemma-3-1b-it, whose image token no text has; a token of text would index past the embeddings."""
    model = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({"id": size, "content": "<image>", "special": special} | flags)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = ModelConfig(path=str(folder))
    if special:
        with pytest.warns(UserWarning, match="no embedding of 1 special tokens"):
            assert load_spec(config, load_tokenizer(config)).vocab_size == size
    else:
        with pytest.raises(ConfigError, match=f"ids up to {size}, and the model embeds only {size}"):
            load_spec(config, load_tokenizer(config))
