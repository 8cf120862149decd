"""Models and the environment for tests of the double itself."""

from __future__ import annotations

from pathlib import Path

import on_double  # noqa: F401 - it makes the double importable
import pytest
import torch
from rlplug_devkit.models import make_model_folder
from transformers import LlamaConfig, LlamaForCausalLM
from trtllm_double.bench import prepare_environment


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model_folder("llama", path)
    return path


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are more than one block of FP8."""
    path = tmp_path_factory.mktemp("blocks")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=64, num_hidden_layers=1, head_dim=64, initializer_range=0.15)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def contract_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables that the contract asks for."""
    prepare_environment(monkeypatch)
