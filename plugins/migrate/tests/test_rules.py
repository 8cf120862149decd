"""What several keys decide together."""

from __future__ import annotations

from typing import Any

import pytest
from migrate_cases import converted
from rlplug_migrate.verl.names import ACTOR, FSDP, MODEL, OPTIM, ROLLOUT

INIT = "model.algorithm.init_args"
GRPO = "algorithm.adv_estimator=grpo"
CORRECTION = "algorithm.rollout_correction"
VERL: dict[str, tuple[list[str], dict[str, Any]]] = {
    "GSPO keeps verl's clip": (
        [GRPO, f"{ACTOR}.policy_loss.loss_mode=gspo"],
        {"model.algorithm.class_path": "GSPO", f"{INIT}.clip_low": 0.2, f"{INIT}.aggregation": "token"},
    ),
    "CISPO's bounds are weights": (
        [GRPO, f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_high=4.0"],
        {f"{INIT}.ratio_min": 0.8, f"{INIT}.ratio_max": 5.0, f"{INIT}.clip_low": None},
    ),
    "one clip for both sides": (
        [GRPO, f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_high=0.3"],
        {f"{INIT}.clip_low": 0.1, f"{INIT}.clip_high": 0.3},
    ),
    "DAPO": (
        [GRPO, "algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"],
        {"model.algorithm.class_path": "DAPO", f"{INIT}.dynamic_sampling": True, f"{INIT}.max_refills": 9},
    ),
    "KL in the reward, adaptive": (
        ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"],
        {f"{INIT}.kl_estimator": "k1", f"{INIT}.kl_target": 0.2, f"{INIT}.kl_horizon": 10000, f"{INIT}.kl_in": None},
    ),
    "KL in PPO's loss": (
        [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=mse"],
        {f"{INIT}.kl_in": "loss", f"{INIT}.kl_estimator": "k2", f"{INIT}.k3_max": None},
    ),
    "no KL by a coefficient alone": ([GRPO, f"{ACTOR}.kl_loss_coef=0.1"], {f"{INIT}.kl_coefficient": None}),
    "a mask between two bounds": (
        [GRPO, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"],
        {f"{INIT}.correction.mode": "mask", f"{INIT}.correction.floor": 0.5, f"{INIT}.correction.cap": 5.0},
    ),
    "SGLang's names": (
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.max_num_seqs=64", f"{ROLLOUT}.enable_prefix_caching=True"],
        {
            "model.rollout.class_path": "SGLangRollout",
            "model.rollout.init_args.max_running_requests": 64,
            "model.rollout.init_args.disable_radix_cache": False,
        },
    ),
    "arguments of the engine's own": (
        [f"{ROLLOUT}.name=vllm", f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=4"],
        {"model.rollout.init_args.engine_args": {"swap_space": 4}},
    ),
    "copies of the weights": (
        [f"{FSDP}.fsdp_size=8", "trainer.nnodes=4", f"{ACTOR}.ulysses_sequence_parallel_size=2"],
        {"trainer.strategy.init_args.replicate": 4, "trainer.strategy.init_args.sequence": 2},
    ),
    "micro-batches without a budget": (
        [f"{ACTOR}.ppo_micro_batch_size=128", f"{ACTOR}.ppo_max_token_len_per_gpu=9000"],
        {"model.batch.micro_batch_size_per_gpu": 16, "model.batch.max_tokens_per_gpu": None},
    ),
    "forward-only passes have rows of their own": (
        [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16"],
        {"model.batch.micro_batch_size_per_gpu": 4, "model.batch.micro_batch_size_per_gpu_forward": 16},
    ),
    "a critic has budgets of its own": (
        [
            *("algorithm.adv_estimator=gae", "critic.model.path=m", f"{ACTOR}.use_dynamic_bsz=True"),
            *("critic.ppo_max_token_len_per_gpu=9000", "critic.forward_max_token_len_per_gpu=36000"),
        ],
        {"model.critic.max_tokens_per_gpu": 9000, "model.critic.max_tokens_per_gpu_forward": 36000},
    ),
    "a whole step is one mini-batch": (
        ["data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64", f"{ROLLOUT}.n=8"],
        {"model.batch.mini_batch_size": None},
    ),
    "fused kernels need no chunks": (
        [f"{MODEL}.use_fused_kernels=True", f"{ACTOR}.entropy_checkpointing=True"],
        {"model.optimizations": [{"class_path": "GradientCheckpointing"}, {"class_path": "FusedLogprobs"}]},
    ),
    "validation that samples": (
        ["data.val_files=v.parquet", f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.temperature=0.6"],
        {"model.validation.sampling.temperature": 0.6, "model.validation.at_start": True},
    ),
    "warm-up": (
        [f"{OPTIM}.lr_warmup_steps=10"],
        {"model.lr_scheduler.init_args.start_factor": 0.1, "model.lr_scheduler.init_args.total_iters": 10},
    ),
    "steps of a profile": (
        [GRPO, "global_profiler.tool=torch", "global_profiler.steps=[3,4,5]"],
        {"profile.steps": "3-5", "profile.tool": "torch"},
    ),
    "adapters": (
        [f"{MODEL}.lora_rank=32", f"{MODEL}.target_modules=[q_proj,v_proj]"],
        {"model.lora.rank": 32, "model.lora.alpha": 16, "model.lora.targets": ["q_proj", "v_proj"]},
    ),
}
TRL: dict[str, tuple[list[str], dict[str, Any]]] = {
    "Dr. GRPO": (
        ["--loss_type", "dr_grpo", "--scale_rewards", "false"],
        {f"{INIT}.aggregation": "constant", f"{INIT}.normalize_std": False},
    ),
    "steps of RL": (
        ["--max_steps", "40", "--steps_per_generation", "4", "--num_iterations", "2", "--save_steps", "16"],
        {"model.num_steps": 5, "checkpoint.every_n_steps": 2, "model.batch.num_epochs": 2},
    ),
    "a server": (
        ["--use_vllm", "--vllm_mode", "server", "--vllm_server_port", "8001"],
        {"model.rollout.class_path": "VLLMServerRollout", "model.rollout.init_args.urls": ["http://0.0.0.0:8001"]},
    ),
    "rewards with weights": (
        ["--reward_funcs", "accuracy_reward", "mine.score", "--reward_weights", "1.0", "0.5"],
        {
            "model.rewards": [
                {"class_path": "MathVerify", "init_args": {"weight": 1.0}},
                {"class_path": "FunctionReward", "init_args": {"function": "mine.score", "weight": 0.5}},
            ]
        },
    ),
    "no correction": (
        ["--use_vllm", "--vllm_importance_sampling_correction", "false"],
        {f"{INIT}.correction": None, f"{INIT}.correction.level": None},
    ),
}


@pytest.mark.parametrize("name", VERL)
def test_verl(name: str) -> None:
    arguments, expected = VERL[name]
    settings = converted("verl", *arguments).settings
    assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.parametrize("name", TRL)
def test_trl(name: str) -> None:
    arguments, expected = TRL[name]
    settings = converted("trl", "--learning_rate", "1e-6", *arguments, num_gpus=4).settings
    assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (["algorithm.adv_estimator=remax"], "algorithm.adv_estimator", "not there: remax"),
        ([GRPO, f"{ACTOR}.policy_loss.loss_mode=sapo"], f"{ACTOR}.policy_loss.loss_mode", "not there: sapo"),
        ([GRPO, "algorithm.use_kl_in_reward=True"], "algorithm.use_kl_in_reward", "GRPO is in the loss"),
        (
            [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.max_num_batched_tokens=9"],
            f"{ROLLOUT}.max_num_batched_tokens",
            "sglang",
        ),
        ([f"{ACTOR}.loss_agg_mode=token-sum"], f"{ACTOR}.loss_agg_mode", "not there: token-sum"),
        ([f"{ACTOR}.strategy=megatron"], f"{ACTOR}.strategy", "not there: megatron"),
        (["data.truncation=left"], "data.truncation", "not there: left"),
        (["data.train_batch_sise=4", GRPO], "data.train_batch_sise", "not there"),
        (["trainer.save_freq=-1"], "trainer.save_freq", "every 50 steps"),
    ],
)
def test_what_is_not_there_is_listed(arguments: list[str], key: str, words: str) -> None:
    assert words in converted("verl", *arguments).lacking[key]


def test_an_algorithm_that_is_not_there_is_not_replaced() -> None:
    """Catches a conversion that trains with another algorithm: a run refuses the name."""
    assert converted("verl", "algorithm.adv_estimator=remax").settings["model.algorithm.class_path"] == "remax"


def test_values_that_are_defaults_are_marked() -> None:
    draft = converted("verl", GRPO, "data.train_batch_size=64")
    assert "model.batch.prompts_per_step" not in draft.from_defaults
    assert draft.from_defaults["model.sampling.max_new_tokens"] == "default of verl"
