"""Fixtures of all tests: tiny real models, saved as anyone would save them, and plugins, installed as pip does."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from ranks import run_ranks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rlplug.interfaces.rollout import Placement
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.models.loading import load_model
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Prompt, Sample
from rlplug.weight_sync.buckets import weight_buckets

torch.set_num_threads(1)  # for models this small, waiting for each other is most of what two threads do

TINY_MODEL = Path(__file__).parent / "model"

IS_BEFORE_5_13 = Version(transformers.__version__) < Version("5.13")
"""Routers of Granite, DeepSeek, GLM-4 and Phimoe have another form there, and Nemotron has attention of its own."""
IS_BEFORE_5_24 = Version(transformers.__version__) < Version("5.24")
"""Falcon's masks do not read positions there."""

VOCABULARY = 32
"""More than the tokenizer's 13, so that top-k and top-p have something to cut."""


OTHER_FAMILIES = {
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "mistral": MistralConfig,
}


def model_config(family: str) -> Any:
    common = {"vocab_size": VOCABULARY, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    if family.startswith("llama"):
        config = AutoConfig.from_pretrained(TINY_MODEL)
        config.update(common | {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 96})
        config.tie_word_embeddings = family == "llama_tied"
        return config
    if family == "qwen2":
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        return Qwen2Config(**common, **sizes, num_hidden_layers=2, max_position_embeddings=32, tie_word_embeddings=True)
    if family in OTHER_FAMILIES:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 32}
        windows = {} if family in ("qwen3", "gemma") else {"sliding_window": 5}
        return OTHER_FAMILIES[family](**common, **heads, **sizes, **windows)
    assert family == "gpt2"  # learned positions, dropout on, tied
    return GPT2Config(**common, n_embd=48, n_layer=3, n_head=4, n_positions=32)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family, such as ``llama``, ``llama_tied`` or ``gpt2``: float32 weights and a tokenizer.

    The weights are large enough for distributions that are far from uniform.
    """
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folder = folders[family] = tmp_path_factory.mktemp(family)
            config = model_config(family)
            config.initializer_range = 0.25
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(len(family))
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                for name, parameter in model.named_parameters():
                    if name.endswith("bias"):
                        torch.nn.init.normal_(parameter, std=0.25)
            model.save_pretrained(folder)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TINY_MODEL / name, folder)
        return folders[family]

    return folder_of


@pytest.fixture
def copied_folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a model's folder for a test that changes it; keyword arguments change its configuration."""

    def copy(family: str, **config: Any) -> Path:
        folder = shutil.copytree(model_folder(family), tmp_path / "model")
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | config))
        return folder

    return copy


@pytest.fixture
def start_engine() -> Callable[..., HFRollout]:
    """Start an engine for a folder, with the weights of ``policy`` unless that is ``None``."""

    def start(folder: Path, policy: torch.nn.Module | None, **options: Any) -> HFRollout:
        config = ModelConfig(path=str(folder), dtype="float32")
        engine = HFRollout(**options)
        engine.start(load_spec(config, load_tokenizer(config)), Placement(torch.device("cpu"), rank=0, world_size=1))
        if policy is not None:
            engine.update_weights(weight_buckets(policy, torch.float32), version=1)
        return engine

    return start


@pytest.fixture(scope="session")
def load_policy() -> Callable[[Path], torch.nn.Module]:
    return lambda folder: load_model(ModelConfig(path=str(folder), dtype="float32"))


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Install a distribution with one plugin, as pip leaves it, in a folder of its own at the front of ``sys.path``."""
    monkeypatch.delenv("RLPLUG_BLOCK", raising=False)

    def install(
        name: str, body: str, distribution: str | None = None, version: str = "2.5", value: str | None = None
    ) -> Path:
        """Return the file of the plugin's module; ``value`` is what the entry point names instead of the module."""
        distribution = distribution or f"acme-{name}"
        module = f"{distribution}_plugin".replace("-", "_")
        folder = tmp_path / f"[{distribution}]"  # brackets are markup to rich, which prints the path
        info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[rlplug.plugins]\n{name} = {value or module}\n")
        (folder / f"{module}.py").write_text(body)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        return folder / f"{module}.py"

    yield install
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session", name="run_ranks")
def fixture_run_ranks() -> Callable[[list[str], int], None]:
    return run_ranks


@pytest.fixture(scope="session")
def run_jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
    """Return what the jobs of ``mesh_worker.py``, by name, give on that many processes."""

    def run(world_size: int, jobs: dict[str, Any]) -> dict[str, Any]:
        path = tmp_path_factory.mktemp(f"jobs-{world_size}") / "jobs.json"
        path.write_text(json.dumps(jobs))
        run_ranks([str(Path(__file__).parent / "unit/distributed/mesh_worker.py"), str(path)], world_size)
        results: dict[str, Any] = torch.load(path.with_name("results.pt"))
        return results

    return run


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """Make one sample, of which a test says only what matters to it."""

    def make(completion: str = "4", answer: Any = "4", uid: str = "train.jsonl:0", **metadata: Any) -> Sample:
        return Sample(
            prompt=Prompt(uid=uid, token_ids=(1,), text="What is 2 + 2?", answer=answer, metadata=metadata),
            group=0,
            token_ids=(1, 2),
            response_mask=(False, True),
            rollout_logprobs=(0.0, -1.0),
            completion=completion,
            finish_reason="stop",
            policy_version=0,
        )

    return make
