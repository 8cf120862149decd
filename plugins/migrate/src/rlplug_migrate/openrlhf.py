"""Keys of OpenRLHF: arguments of ``openrlhf.cli.train_ppo_ray``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import OMIT, Framework, Key, none, positive, same
from rlplug_migrate.loggers import append_logger

_INIT: Final = "model.algorithm.init_args"
_CLASS: Final = "model.algorithm.class_path"
_ENGINE: Final = "model.rollout.init_args"
_LIST: Final = "model.optimizations"
ESTIMATORS: Final[Mapping[str, str]] = {
    "gae": "PPO",
    "group_norm": "GRPO",
    "dr_grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce": "ReinforcePP",
    "reinforce_baseline": "ReinforcePPBaseline",
}

KEYS: Final = (
    Key("advantage_estimator", "algorithm", _CLASS, default="gae", values=ESTIMATORS),
    Key("policy_loss_type", "algorithm", f"{_CLASS}: GSPO"),
    Key("init_kl_coef", "algorithm", f"{_INIT}.kl_coefficient", default=0.01),
    Key("use_kl_loss", "algorithm", f"{_INIT}.kl_in"),
    Key("kl_estimator", "algorithm", f"{_INIT}.kl_estimator", default="k1"),
    Key("use_kl_estimator_k3", "algorithm", f"{_INIT}.kl_estimator"),
    Key("no_advantage_std_norm", "algorithm", f"{_INIT}.normalize_std"),
    Key("kl_target", "algorithm", f"{_INIT}.kl_target"),
    Key("kl_horizon", "algorithm", f"{_INIT}.kl_horizon"),
    Key("eps_clip", "algorithm", f"{_INIT}.clip_low, {_INIT}.clip_high", default=0.2),
    Key("eps_clip_low_high", "algorithm", f"{_INIT}.clip_low, {_INIT}.clip_high"),
    Key("dual_clip", "algorithm", f"{_INIT}.clip_dual"),
    Key("value_clip", "algorithm", f"{_INIT}.value_clip", default=0.5),
    Key("gamma", "algorithm", f"{_INIT}.gamma"),
    Key("lambd", "algorithm", f"{_INIT}.gae_lambda", default=1.0),
    Key("entropy_loss_coef", "algorithm", f"{_INIT}.entropy_coefficient"),
    Key("dynamic_filtering", "algorithm", f"{_INIT}.dynamic_sampling"),
    Key("enable_vllm_is_correction", "algorithm", f"{_INIT}.correction"),
    Key("vllm_is_correction_type", "algorithm", f"{_INIT}.correction.mode", default="tis"),
    Key("critic_learning_rate", "algorithm", "model.critic.optimizer.init_args.lr", default=9e-6),
    Key("critic_pretrain", "algorithm", "model.critic.trunk.path"),
    same("rollout_batch_size", "tuning", "model.batch.prompts_per_step", default=1024),
    same("n_samples_per_prompt", "tuning", "model.batch.group_size", default=1),
    Key("train_batch_size", "tuning", "model.batch.mini_batch_size", "counts completions", default=128),
    same("max_epochs", "tuning", "model.batch.num_epochs"),
    Key("micro_train_batch_size", "tuning", "model.batch.micro_batch_size_per_gpu"),
    Key("use_dynamic_batch", "tuning", "model.batch.max_tokens_per_gpu", "is the default here"),
    Key("train_max_tokens_per_gpu", "tuning", "model.batch.max_tokens_per_gpu"),
    Key("rollout_max_tokens_per_gpu", "tuning", "model.batch.max_tokens_per_gpu_forward"),
    Key("gradient_checkpointing", "tuning", f"{_LIST}: GradientCheckpointing"),
    Key("use_liger_kernel", "tuning", f"{_LIST}: Liger"),
    Key("adam_offload", "tuning", "model.memory.offload", "leaves the GPU while the engine generates"),
    Key("deepspeed_enable_sleep", "tuning", "model.memory.offload"),
    Key("ring_attn_size", "tuning", "trainer.strategy.init_args.sequence"),
    Key("ds_tensor_parallel_size", "tuning", "trainer.strategy.init_args.tensor"),
    Key("lora_rank", "tuning", "model.lora.rank"),
    Key("lora_alpha", "tuning", "model.lora.alpha", default=16),
    Key("target_modules", "tuning", "model.lora.targets"),
    Key("vllm_gpu_memory_utilization", "engine", f"{_ENGINE}.gpu_memory_utilization", default=0.95),
    Key("vllm_tensor_parallel_size", "engine", f"{_ENGINE}.tensor_parallel_size", default=1),
    Key("enforce_eager", "engine", f"{_ENGINE}.enforce_eager"),
    Key("enable_prefix_caching", "engine", f"{_ENGINE}.enable_prefix_caching"),
    same("vllm_enable_sleep", "engine", "model.memory.sleep_between_rollouts"),
    same("temperature", "engine", "model.sampling.temperature"),
    same("top_p", "engine", "model.sampling.top_p"),
    same("generate_max_len", "data", "model.sampling.max_new_tokens", default=1024),
    same("prompt_max_len", "data", "data.max_prompt_tokens", "refuses longer prompts", default=1024),
    same("pretrain", "trainer", "model.policy.path"),
    Key("param_dtype", "trainer", "model.policy.dtype", read=lambda value: "bfloat16" if value == "bf16" else OMIT),
    Key("actor_learning_rate", "trainer", "model.optimizer.init_args.lr", default=1e-6),
    Key("adam_betas", "trainer", "model.optimizer.init_args.betas", default=[0.9, 0.95]),
    Key("l2", "trainer", "model.optimizer.init_args.weight_decay", default=0.0),
    same("max_norm", "trainer", "model.limits.max_grad_norm"),
    same("actor_num_nodes", "trainer", "trainer.num_nodes", default=1),
    same("actor_num_gpus_per_node", "trainer", "trainer.devices", default=8),
    Key("num_episodes", "trainer", "model.num_steps", "counts steps: rows x episodes / prompts_per_step"),
    Key("eval_steps", "trainer", "model.validation.every_n_steps", read=positive),
    Key("save_steps", "checkpoint", "checkpoint.every_n_steps", read=positive),
    Key("max_ckpt_num", "checkpoint", "checkpoint.keep", read=positive),
    same("save_path", "checkpoint", "run.dir", default="runs/openrlhf"),
    Key("prompt_data", "data", "data.train.init_args.path"),
    Key("input_key", "data", "data.train.init_args.prompt_key"),
    Key("label_key", "data", "data.train.init_args.answer_key"),
    Key("max_samples", "data", "data.train.init_args.limit"),
    Key("apply_chat_template", "data", "data.chat", read=bool),
    Key("reward_pretrain", "data", "model.rewards: RewardModel"),
    Key("use_wandb", "logger", "trainer.logger"),
    Key("wandb_project", "logger", "trainer.logger", default="openrlhf_train_ppo"),
    Key("seed", "trainer", "seed_everything", default=42, read=lambda value: value),
    *none("data", "write a FunctionReward of the function in that file, or a RemoteRewardModel", "remote_rm_url"),
    *none("algorithm", "set DAPO's overlong_buffer and overlong_penalty by hand", "overlong_*"),
    *none("data", "write a class of yours as model.environment", "agent_func_path"),
    *none("data", "not there: rewards are not normalised by a running mean", "normalize_reward", "reward_clip_range"),
    *none("tuning", "sets itself: sequences are packed, without padding", "packing_samples"),
    *none(
        "tuning",
        "sets itself: FSDP2 over all GPUs",
        "zero_stage",
        "zpg",
        "overlap_comm",
        "grad_accum_dtype",
        "bf16",
        "deepcompile",
    ),
    *none(
        "trainer",
        "all models share the GPUs of trainer.devices",
        "colocate_*",
        "ref_num_*",
        "reward_num_*",
        "critic_num_*",
        "vllm_num_engines",
    ),
    *none("engine", "done by the engine plugin", "vllm_sync_*"),
    *none("trainer", "model.partial_rollout.asynchronous", "async_*", "partial_rollout"),
    *none("checkpoint", "rlplug fit --resume RUN", "load_checkpoint"),
    *none(
        "checkpoint",
        "the folder policy/ of the run",
        "save_hf_ckpt",
        "ckpt_path",
        "disable_ds_ckpt",
        "max_ckpt_mem",
        "save_value_network",
    ),
    *none(
        "trainer",
        "not there",
        "freezing_actor_steps",
        "actor_init_on_gpu",
        "enable_ema",
        "ema_beta",
        "ptx_coef",
        "micro_rollout_batch_size",
        "logging_steps",
        "ring_head_stride",
        "fsdp2_enable_sleep",
        "use_tensorboard",
        "lora_dropout",
        "load_in_4bit",
        "lr_*",
        "dynamic_filtering_*",
        "vllm_is_*",
        "vllm_generate_batch_size",
        "rollout_tasks_per_gpu",
        "wandb_*",
        "flash_attn",
        "attn_implementation",
        "prompt_*",
        "eval_*",
        "full_determinism",
        "kl_*",
    ),
)


def write_algorithm(given: Given, draft: Draft) -> None:
    """Choose the class, and write clipping, KL penalty, correction and critic."""
    estimator = given["advantage_estimator"]
    name = ESTIMATORS.get(estimator, str(estimator))
    if estimator not in ESTIMATORS:
        draft.lacks("advantage_estimator", f"not there: {estimator}; a run will ask for an algorithm that is")
    if name == "GRPO" and given["policy_loss_type"] == "gspo":
        name = "GSPO"
    elif name == "GRPO" and given["dynamic_filtering"]:
        name = "DAPO"
    draft.set(_CLASS, name, "advantage_estimator")
    low, high = given["eps_clip_low_high"] or (given["eps_clip"], given["eps_clip"])
    draft.set(f"{_INIT}.clip_low", float(low), "eps_clip")
    draft.set(f"{_INIT}.clip_high", float(high), "eps_clip")
    for theirs, ours in (("dual_clip", "clip_dual"), ("entropy_loss_coef", "entropy_coefficient")):
        if given[theirs]:
            draft.set(f"{_INIT}.{ours}", float(given[theirs]), theirs)
    if name in ("GRPO", "GSPO", "DAPO") and (estimator == "dr_grpo" or given["no_advantage_std_norm"]):
        draft.settings[f"{_INIT}.normalize_std"] = False
    if name == "PPO":
        _write_ppo(given, draft)
    _write_kl(given, draft, name)
    if given["enable_vllm_is_correction"]:
        masks = given["vllm_is_correction_type"] == "icepop"
        draft.set(f"{_INIT}.correction.level", "token", "enable_vllm_is_correction")
        draft.settings[f"{_INIT}.correction.mode"] = "mask" if masks else "truncate"


def _write_ppo(given: Given, draft: Draft) -> None:
    draft.set(f"{_INIT}.gae_lambda", float(given["lambd"]), "lambd")
    draft.set(f"{_INIT}.value_clip", float(given["value_clip"]), "value_clip")
    draft.settings["model.critic.optimizer.class_path"] = "torch.optim.AdamW"
    draft.set("model.critic.optimizer.init_args.lr", float(given["critic_learning_rate"]), "critic_learning_rate")
    if given["critic_pretrain"] is None and given["reward_pretrain"] is not None:
        draft.note("critic_pretrain", "model.critic", "starts from the policy; OpenRLHF's from the reward model")
    if given["critic_pretrain"] not in (None, given["pretrain"]):
        draft.set("model.critic.trunk.path", given["critic_pretrain"], "critic_pretrain")


def _write_kl(given: Given, draft: Draft, name: str) -> None:
    coefficient = float(given["init_kl_coef"])
    in_loss = name in ("GRPO", "GSPO", "DAPO", "ReinforcePPBaseline")
    if not coefficient:
        return
    if in_loss and not given["use_kl_loss"]:
        draft.lacking["init_kl_coef"] = f"not there: the KL penalty of {name} is in the loss: --use_kl_loss"
        return
    draft.set(f"{_INIT}.kl_coefficient", coefficient, "init_kl_coef")
    estimator = "k3" if given["use_kl_estimator_k3"] else given["kl_estimator"]
    draft.set(f"{_INIT}.kl_estimator", "k3_unweighted" if estimator == "k3" else estimator, "kl_estimator")
    if name == "PPO" and given["use_kl_loss"]:
        draft.set(f"{_INIT}.kl_in", "loss", "use_kl_loss")


def write_rest(given: Given, draft: Draft) -> None:
    """Write sizes, engine, memory, optimizer, data and rewards."""
    completions = given["rollout_batch_size"] * given["n_samples_per_prompt"]
    if given["train_batch_size"] < completions:
        draft.set("model.batch.mini_batch_size", given["train_batch_size"], "train_batch_size")
    if given["use_dynamic_batch"]:
        for theirs, ours in (("train", "max_tokens_per_gpu"), ("rollout", "max_tokens_per_gpu_forward")):
            if f"{theirs}_max_tokens_per_gpu" in given:
                name = f"{theirs}_max_tokens_per_gpu"
                draft.set(f"model.batch.{ours}", given[name], name)
    elif "micro_train_batch_size" in given:
        draft.set("model.batch.micro_batch_size_per_gpu", given["micro_train_batch_size"], "micro_train_batch_size")
    draft.settings[f"{_ENGINE.removesuffix('.init_args')}.class_path"] = "VLLMRollout"
    for theirs, ours in (
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
        ("vllm_tensor_parallel_size", "tensor_parallel_size"),
        ("enforce_eager", "enforce_eager"),
        ("enable_prefix_caching", "enable_prefix_caching"),
    ):
        if given[theirs] is not None:
            draft.set(f"{_ENGINE}.{ours}", given[theirs], theirs)
    for theirs, ours in (("gradient_checkpointing", "GradientCheckpointing"), ("use_liger_kernel", "Liger")):
        if given[theirs]:
            draft.append(_LIST, {"class_path": ours})
    _write_memory(given, draft)
    draft.settings["model.optimizer.class_path"] = "torch.optim.AdamW"
    draft.set("model.optimizer.init_args.lr", float(given["actor_learning_rate"]), "actor_learning_rate")
    draft.set("model.optimizer.init_args.betas", [float(beta) for beta in given["adam_betas"]], "adam_betas")
    draft.set("model.optimizer.init_args.weight_decay", float(given["l2"]), "l2")
    _write_data(given, draft)


def _write_memory(given: Given, draft: Draft) -> None:
    if given["deepspeed_enable_sleep"]:
        draft.set("model.memory.offload", "optimizer_and_weights", "deepspeed_enable_sleep")
    elif given["adam_offload"]:
        draft.set("model.memory.offload", "optimizer", "adam_offload")
    mesh = {"sequence": given["ring_attn_size"], "tensor": given["ds_tensor_parallel_size"]}
    if mesh := {name: size for name, size in mesh.items() if isinstance(size, int) and size > 1}:
        draft.settings["trainer.strategy.class_path"] = "rlplug.distributed.strategy.RLFSDP2Strategy"
        draft.settings.update({f"trainer.strategy.init_args.{name}": size for name, size in mesh.items()})
    if given["lora_rank"]:
        for theirs, ours in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("target_modules", "targets")):
            if given[theirs] is not None:
                draft.set(f"model.lora.{ours}", given[theirs], theirs)


def _write_data(given: Given, draft: Draft) -> None:
    options: dict[str, Any] = {"path": given["prompt_data"] or "train.jsonl"}
    for theirs, ours in (("input_key", "prompt_key"), ("label_key", "answer_key"), ("max_samples", "limit")):
        if theirs in given:
            options[ours] = given[theirs]
    is_file = str(options["path"]).endswith((".jsonl", ".json", ".parquet", ".csv"))
    source = {"class_path": "FileSource" if is_file else "HFDatasetSource", "init_args": options}
    draft.set("data.train", source, "prompt_data")
    if (model := given["reward_pretrain"]) is not None:
        draft.append("model.rewards", {"class_path": "RewardModel", "init_args": {"path": model}})
    else:
        draft.append("model.rewards", {"class_path": "MathVerify"})
        draft.note("reward_pretrain", "model.rewards", "none is named; MathVerify is for mathematics")
    if given["num_episodes"] not in (None, 1):
        draft.lacks("num_episodes", "set model.num_steps: rows x episodes / prompts_per_step; without it, one pass")
    if given["use_wandb"]:
        append_logger(draft, "wandb", str(given["wandb_project"]), str(given["save_path"]), "use_wandb")


OPENRLHF: Final = Framework(
    name="OpenRLHF",
    version="0.9",
    keys=KEYS,
    rules=(write_algorithm, write_rest),
    program=r"\bopenrlhf\.cli\.train_ppo_ray\b",
    takes_options=True,
    sections=frozenset({"pretrain", "prompt_data", "actor_learning_rate", "rollout_batch_size", "advantage_estimator"}),
)
