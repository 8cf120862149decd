"""Training with vLLM on the CPU, through the command line: one key moves a run from HFRollout to it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlplug.observability.metrics_log import read_metrics

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

ROOT = Path(__file__).parents[3]
VLLM = ["--model.rollout", "VLLMRollout", "--model.rollout.kv_cache_gib", "0.25"]


def fit(folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Run ``rlplug fit`` in the repository and return its metrics, a row per step."""
    command = [sys.executable, "-m", "rlplug", "fit", *arguments, "--run.report", "false", "--run.dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return read_metrics(folder / "001" / "metrics.jsonl")


QUICKSTART = ["--config", "configs/quickstart.yaml", "--model.validation.at_start", "false"]
FAMILIES = {
    "llama": {},
    "tied llama": {"tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 2},
}
"""What the configuration of ``tests/model`` becomes."""
ENGINES = [("TransformersTrainer", 1), ("TransformersTrainer", 2), ("TorchTitan", 1), ("TorchTitan", 2)]


@pytest.mark.parametrize(
    ("trainer", "tensor_parallel_size"),
    [pytest.param(*case, marks=() if case == ("TorchTitan", 2) else pytest.mark.nightly) for case in ENGINES],
)
def test_two_processes_sync_their_shards(tmp_path, trainer, tensor_parallel_size):
    """Engine and trainer agree on every sampled token, so each engine holds what the two ranks' shards are."""
    options = ["--trainer.devices", "2", "--model.num_steps", "3", "--model.trainer", trainer]
    parallel = ["--model.rollout.tensor_parallel_size", str(tensor_parallel_size)]
    steps = fit(tmp_path, *QUICKSTART, *options, *VLLM, *parallel)
    assert len(steps) == 3
    for step in steps:
        assert step["mismatch/mean"] < 1e-5
        assert step["mismatch/max"] < 1e-4
        assert step["sync/gib"] > 0.001
        assert step["rollout/restarts"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_adapters_alone_are_served_on_two_processes(tmp_path, tensor_parallel_size):
    """It catches adapters of another version, layer or rank's shard: engine and trainer would not agree."""
    lora = ["--model.lora", "{rank: 8, alpha: 16, sync: adapters}", "--model.optimizer.lr", "0.01"]
    parallel = ["--model.rollout.tensor_parallel_size", str(tensor_parallel_size), "--trainer.devices", "2"]
    steps = fit(tmp_path, *QUICKSTART, "--model.num_steps", "3", *VLLM, *lora, *parallel)
    first, *later = [step["sync/gib"] for step in steps]
    assert all(gib < 0.2 * first for gib in later)
    for step in steps:
        assert step["mismatch/mean"] < 1e-5
        assert step["mismatch/max"] < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_torchtitan_syncs_each_family(tmp_path, family):
    """It catches rows of queries and keys in TorchTitan's order, and weights that vLLM knows under other names."""
    folder = shutil.copytree(ROOT / "tests" / "model", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(config))
    options = ["--model.num_steps", "4", "--model.policy.path", str(folder), "--model.trainer", "TorchTitan"]
    steps = fit(tmp_path / "run", *QUICKSTART, *options, *VLLM)
    assert len(steps) == 4
    for step in steps:
        assert step["mismatch/mean"] < 1e-5


@pytest.mark.nightly
def test_learning_curves_of_both_engines_overlap(tmp_path):
    """The first 70 of the quickstart's 160 steps, in which its reward rises from 0 to about 0.5."""
    options = [*QUICKSTART, "--model.num_steps", "70", "--model.validation.every_n_steps", "null"]
    curves = {}
    for name, engine in (("hf", []), ("vllm", VLLM)):
        rewards = [step["reward/mean"] for step in fit(tmp_path / name, *options, *engine)]
        curves[name] = [sum(rewards[start : start + 10]) / 10 for start in range(0, 70, 10)]
    assert curves["vllm"][0] < 0.1 < 0.25 < curves["vllm"][-1], curves
    assert all(abs(a - b) < 0.25 for a, b in zip(curves["hf"], curves["vllm"], strict=True)), curves


@pytest.mark.nightly
def test_smollm2_trains(tmp_path):
    options = [*VLLM, "--model.rollout.max_model_len", "512", "--model.num_steps", "1"]
    (step,) = fit(tmp_path, "--config", "configs/smollm2.yaml", *options)
    assert step["mismatch/mean"] < 1e-3


@pytest.mark.kit
def test_smollm2_with_a_calculator_takes_a_step(tmp_path):
    """As configs/calculator.yaml has it; few of its turns call, and what they see then follows in the same list."""
    options = [*VLLM, "--model.rollout.max_model_len", "640", "--model.turns.max_tokens_per_turn", "24"]
    options += ["--model.sampling.max_new_tokens", "96", "--model.num_steps", "1"]
    (step,) = fit(tmp_path, "--config", "configs/calculator.yaml", *options)
    assert step["mismatch/mean"] < 1e-3
    assert step["turns/mean"] >= 1
    assert step["environment/failures"] == 0
    assert 0 <= step["environment/tool_calls"] <= 1
    assert step["rollout/prefix_cache_hits"] > 0.5  # the prompt's, by its other completions
