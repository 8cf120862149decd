"""Published examples of verl, TRL and OpenRLHF: what they become, and that a run accepts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Job, Runs
from migrate_cases import converted_example
from rlplug_migrate.yaml_text import to_yaml

PLANNED = ["verl_grpo_qwen3_8b", "verl_ppo_qwen3_8b", "trl_gspo", "trl_grpo_agent"]
EXPECTED: dict[str, dict[str, Any]] = {
    "verl_grpo_qwen3_8b": {
        "trainer.devices": 8,
        "model.batch.prompts_per_step": 1024,
        "model.batch.mini_batch_size": 256 * 5,
        "model.batch.max_tokens_per_gpu": 24576,
        "model.algorithm.class_path": "GRPO",
        "model.algorithm.init_args.kl_estimator": "k3_unweighted",
        "model.algorithm.init_args.k3_max": 10.0,
        "model.algorithm.init_args.clip_dual": 3.0,
        "model.rollout.init_args.tensor_parallel_size": 2,
        "data.too_long": "filter",
        "model.validation.every_n_steps": 5,
        "checkpoint.every_n_steps": 20,
    },
    "verl_ppo_qwen3_8b": {
        "model.algorithm.class_path": "PPO",
        "model.algorithm.init_args.gae_lambda": 1.0,
        "model.algorithm.init_args.value_clip": 0.5,
        "model.critic.optimizer.init_args.lr": 1e-5,
        "model.critic.warmup_steps": 0,
        "model.batch.mini_batch_size": 256,
    },
    "trl_gspo": {
        "model.algorithm.class_path": "GSPO",
        "model.algorithm.init_args.clip_low": 3e-4,
        "model.batch.prompts_per_step": 8 * 8 * 8 // 8,
        "model.batch.mini_batch_size": 8 * 8 * 2,
        "model.lora.targets": ["q_proj", "v_proj"],
        "model.rollout.class_path": "HFRollout",
    },
    "trl_grpo_agent": {
        "model.algorithm.init_args.correction.mode": "mask",
        "model.algorithm.init_args.correction.cap": 3.0,
        "model.algorithm.init_args.aggregation": "token",
        "model.num_steps": 400,
        "model.lr_scheduler.init_args.end_factor": 0.0,
    },
    "openrlhf_gspo": {
        "model.algorithm.class_path": "GSPO",
        "model.batch.mini_batch_size": 128,
        "model.memory.offload": "optimizer_and_weights",
        "data.train.class_path": None,
    },
}
LACKING = {
    "verl_grpo_qwen3_8b": {
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        "actor_rollout_ref.ref.fsdp_config.param_offload",
        "trainer.balance_batch",
        "trainer.total_epochs",
    },
    "trl_grpo_agent": {"push_to_hub", "log_completions", "report_to"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_keeps_its_sizes_and_its_mathematics(name: str, tmp_path: Path) -> None:
    """Catches a wrong unit: verl's mini-batch counts prompts, TRL's batches count completions per GPU."""
    draft = converted_example(name, tmp_path)
    expected = {key: value for key, value in EXPECTED[name].items() if value is not None}
    assert {key: draft.settings.get(key) for key in expected} == expected
    if name in LACKING:
        assert draft.lacking.keys() == LACKING[name]
    assert all(draft.lacking.values())


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("examples")
    jobs = {}
    for name in PLANNED:
        file = folder / f"{name}.yaml"
        file.write_text(
            yaml.safe_dump(_with_tiny_model(yaml.safe_load(to_yaml(converted_example(name, folder), name))))
        )
        jobs[name] = Job(["plan", "-c", str(file), "--gpu-gib", "80", "--run.dir", str(folder / "runs")])
    return Runs(jobs, folder)


def _with_tiny_model(config: dict[str, Any]) -> dict[str, Any]:
    """Replace the model, its lengths and the data of an example; the logger needs a package that tests do without."""
    config["model"]["policy"]["path"] = "tests/model"
    config["model"]["sampling"]["max_new_tokens"] = 4
    config["data"]["max_prompt_tokens"] = 16
    for split in {"train", "val"} & config["data"].keys():
        source = {"class_path": "FileSource", "init_args": {"path": f"examples/quickstart/{split}.jsonl"}}
        config["data"][split] = source
    config["trainer"]["accelerator"] = "cpu"
    config["trainer"].pop("logger", None)
    return config


@pytest.mark.parametrize("name", PLANNED)
def test_a_run_accepts_what_an_example_becomes(plans: Runs, name: str) -> None:
    """Catches a key, a class or a value that our parser or the checks of a run refuse."""
    assert "batch plan, GPUs: 8" in plans.ended(name).message
