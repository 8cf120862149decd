"""A run of two steps for tests of plugins: a tiny random Llama, a tokenizer with a token per character, few prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import printable
from typing import Any, Final

import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

from rlplug.observability.metrics_log import read_metrics

CHARACTERS: Final = ("<eos>", *printable)
CONFIG: Final[Mapping[str, Any]] = {
    "seed_everything": 0,
    "trainer": {"accelerator": "cpu", "devices": 1},
    "model": {
        "policy": {"path": "model", "init": "random", "dtype": "float32"},
        "algorithm": {"class_path": "GRPO"},
        "rewards": [{"class_path": "FunctionReward", "init_args": {"function": f"{__name__}.starts_low"}}],
        "batch": {"prompts_per_step": 4, "group_size": 4},
        "sampling": {"max_new_tokens": 4},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
        "num_steps": 2,
    },
    "data": {"train": {"class_path": "FileSource", "init_args": {"path": "prompts.jsonl"}}},
    "run": {"dir": "run", "report": False},
}
"""What a test's own configuration is laid over. ``GRPO`` must be installed unless that names another algorithm."""

TINY_LLAMA: Final = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=len(CHARACTERS),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=0,
    pad_token_id=0,
)
"""Configuration of the model."""


@dataclass(frozen=True)
class TinyRun:
    """What a run left in its folder."""

    folder: Path
    metrics: list[dict[str, float]]
    """Metrics of each step, by name; those of a step that has no value are left out."""
    record: dict[str, Any]
    """``run.json``: plugins, versions, effects, status."""


def starts_low(completion: str) -> float:
    """Return 1 where the first character is before ``n``: rewards of a random policy differ."""
    return float(completion[:1].lower() < "n")


def train_two_steps(
    folder: Path,
    config: Path | Mapping[str, Any],
    timeout_s: float = 600.0,
    model: PretrainedConfig = TINY_LLAMA,
) -> TinyRun:
    """Train two steps on the CPU in a process of its own, as ``rlplug fit`` does, and return what the run left.

    Args:
        folder: An empty folder, such as pytest's ``tmp_path``: the model, the prompts and the run go there.
        config: What the run has that :data:`CONFIG` has not, or a YAML file of it. Where it names a class, that class
            replaces the one of ``CONFIG`` with all its arguments.
        timeout_s: Longest time for the run in seconds.
        model: Configuration of the model, with an embedding for each of ``CHARACTERS``.

    Raises:
        AssertionError: The run failed; the message has its output.
    """
    given = yaml.safe_load(config.read_text()) if isinstance(config, Path) else config
    write_task(folder, model)
    (folder / "config.yaml").write_text(yaml.safe_dump(merged(CONFIG, given)))
    # the folders that this process imports from: a run must find what the test finds
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "rlplug", "fit", "-c", "config.yaml"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False}
    done = subprocess.run(command, cwd=folder, env=os.environ | variables, timeout=timeout_s, **options)
    assert done.returncode == 0, f"the run of two steps ended with status {done.returncode}:\n{done.stdout[-10_000:]}"
    run = folder / "run/001"
    return TinyRun(run, read_metrics(run / "metrics.jsonl"), json.loads((run / "run.json").read_text()))


def merged(base: Any, given: Any) -> Any:
    """Return ``base`` with what is ``given``: mappings are merged key by key, classes and all else are replaced."""
    if not (isinstance(base, Mapping) and isinstance(given, Mapping)) or "class_path" in given:
        return given
    return {**base, **{key: merged(base[key], value) if key in base else value for key, value in given.items()}}


def write_task(folder: Path, model: PretrainedConfig = TINY_LLAMA) -> None:
    """Write ``model/``, a model's configuration with its tokenizer, and ``prompts.jsonl``, letters with an answer."""
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(CHARACTERS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<eos>", eos_token="<eos>")
    fast.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    rows = [{"prompt": f"{letter}>", "answer": letter} for letter in "abcdefghijklmnop"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
