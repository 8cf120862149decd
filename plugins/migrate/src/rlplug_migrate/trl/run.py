"""TRL's sizes, optimizer, data, rewards and trainer, most of them those of transformers' ``TrainingArguments``."""

from __future__ import annotations

from typing import Any, Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import Key, none, positive, same
from rlplug_migrate.loggers import append_logger

_INIT: Final = "model.optimizer.init_args"
_SIZE: Final = "model.batch"
_OPTIMIZERS: Final = {
    "adamw_torch": "torch.optim.AdamW",
    "adamw_torch_fused": "torch.optim.AdamW",
    "adamw_torch_8bit": "AdamW8bit",
    "adamw_8bit": "AdamW8bit",
    "adamw_bnb_8bit": "AdamW8bit",
    "sgd": "torch.optim.SGD",
}
_THINK: Final = r"(?s)<think>(?!.*<think>).*?</think>.*"
"""What ``think_format_reward`` asks for."""

KEYS: Final = (
    Key("num_generations", "tuning", f"{_SIZE}.group_size", default=8),
    Key("generation_batch_size", "tuning", f"{_SIZE}.prompts_per_step", "counts prompts; TRL's counts completions"),
    Key("steps_per_generation", "tuning", f"{_SIZE}.prompts_per_step, {_SIZE}.mini_batch_size"),
    Key(
        "per_device_train_batch_size",
        "tuning",
        f"{_SIZE}.micro_batch_size_per_gpu, {_SIZE}.mini_batch_size",
        "a mini-batch counts completions over all GPUs: say how many with --gpus",
        default=8,
    ),
    Key("gradient_accumulation_steps", "tuning", f"{_SIZE}.mini_batch_size", default=1),
    Key("num_iterations", "tuning", f"{_SIZE}.num_epochs", default=1),
    Key("max_steps", "trainer", "model.num_steps", "counts steps of RL; TRL's counts optimizer steps"),
    Key("num_train_epochs", "trainer", "model.num_steps", "counts steps: rows x epochs / prompts_per_step", default=3),
    Key("learning_rate", "trainer", f"{_INIT}.lr", default=1e-6),
    Key("weight_decay", "trainer", f"{_INIT}.weight_decay", default=0.0),
    Key("adam_beta1", "trainer", f"{_INIT}.betas", default=0.9),
    Key("adam_beta2", "trainer", f"{_INIT}.betas", default=0.999),
    Key("adam_epsilon", "trainer", f"{_INIT}.eps"),
    Key("optim", "trainer", "model.optimizer.class_path", default="adamw_torch_fused"),
    Key("lr_scheduler_type", "trainer", "model.lr_scheduler", default="linear"),
    Key("warmup_steps", "trainer", "model.lr_scheduler"),
    same("max_grad_norm", "trainer", "model.limits.max_grad_norm"),
    Key("bf16", "tuning", "model.policy.dtype", "is the default here"),
    Key("shuffle_dataset", "data", "data.shuffle", read=bool),
    Key("seed", "trainer", "seed_everything", default=42),
    Key("data_seed", "data", "data.seed", read=positive),
    Key("eval_strategy", "trainer", "model.validation.every_n_steps"),
    Key("eval_steps", "trainer", "model.validation.every_n_steps"),
    Key("eval_on_start", "trainer", "model.validation.at_start"),
    Key("num_generations_eval", "trainer", "model.validation.num_samples"),
    Key("save_steps", "checkpoint", "checkpoint.every_n_steps", default=500),
    Key("save_strategy", "checkpoint", "checkpoint.every_n_steps"),
    Key("save_total_limit", "checkpoint", "checkpoint.keep", read=positive),
    same("output_dir", "checkpoint", "run.dir", default="trainer_output"),
    Key("report_to", "logger", "trainer.logger"),
    Key("run_name", "logger", "trainer.logger"),
    Key("project", "logger", "trainer.logger", default="huggingface"),
    Key("dataset_name", "data", "data.train.init_args.path"),
    Key("dataset_config", "data", "data.train.init_args.name"),
    Key("dataset_train_split", "data", "data.train.init_args.split", default="train"),
    Key("dataset_test_split", "data", "data.val.init_args.split", default="test"),
    Key("dataset_streaming", "data", "data.train.init_args.streaming"),
    Key("reward_funcs", "data", "model.rewards"),
    Key("reward_weights", "data", "model.rewards: weight"),
    Key("reward_model_name_or_path", "data", "model.rewards: RewardModel"),
    *none(
        "logger",
        "samples.jsonl has completions: run.samples_per_step",
        "log_completions*",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_multimodal",
    ),
    *none(
        "logger",
        "metrics.jsonl has every step",
        "logging_*",
        "log_level*",
        "log_on_each_node",
        "disable_tqdm",
        "include_num_input_tokens_seen",
        "trackio_*",
    ),
    *none("checkpoint", "rlplug export, and the folder policy/ of the run", "push_to_hub", "hub_*"),
    *none(
        "checkpoint",
        "rlplug fit --resume RUN",
        "resume_from_checkpoint",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
    ),
    *none("checkpoint", "a checkpoint has all", "save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
    *none(
        "checkpoint",
        "trainer.callbacks takes ModelCheckpoint and EarlyStopping",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
    ),
    *none(
        "tuning",
        "the mesh is trainer.strategy: FSDP2 over all GPUs by default",
        "fsdp*",
        "deepspeed",
        "ddp_*",
        "accelerator_config*",
        "parallelism_config*",
        "local_rank",
    ),
    *none("data", "a reward gets the whole row in metadata", "remove_unused_columns", "label_names"),
    *none(
        "data",
        "sets itself: sequences are packed, without padding",
        "pad_to_multiple_of",
        "length_column_name",
        "train_sampling_strategy",
    ),
    *none("data", "sets itself: prompts are tokenized once", "dataloader_*", "dataset_num_proc"),
    *none("tuning", "not there: float16; bfloat16 and float32 are", "fp16*", "bf16_full_eval", "tf32"),
    *none(
        "tuning",
        "sets itself: micro-batches are filled with tokens",
        "auto_find_batch_size",
        "per_device_eval_batch_size",
        "eval_accumulation_steps",
        "torch_empty_cache_steps",
        "use_cache",
    ),
    *none("trainer", "set trainer.deterministic", "full_determinism"),
    *none("trainer", "set trainer.accelerator: cpu", "use_cpu"),
    *none("trainer", "the command says it: rlplug fit, rlplug validate", "do_train", "do_eval", "do_predict"),
    *none(
        "trainer",
        "not there",
        "optim_*",
        "lr_scheduler_kwargs*",
        "warmup_ratio",
        "label_smoothing_factor",
        "neftune_noise_alpha",
        "average_tokens_across_devices",
        "eval_*",
        "include_for_metrics",
        "batch_eval_metrics",
        "prediction_loss_only",
        "debug",
        "skip_memory_metrics",
        "ignore_bias_buffers",
    ),
)


def write_sizes(given: Given, draft: Draft) -> None:
    """Write prompts, groups and mini-batches; TRL's sizes are completions per GPU."""
    per_gpu, group = given["per_device_train_batch_size"], given["num_generations"]
    num_gpus = given.num_gpus or 1
    mini = per_gpu * num_gpus * given["gradient_accumulation_steps"]
    steps = given.first("steps_per_generation", "gradient_accumulation_steps")
    generated = given["generation_batch_size"] or per_gpu * num_gpus * steps
    if given.num_gpus is None:
        draft.note(
            "per_device_train_batch_size", f"{_SIZE}.prompts_per_step", "of 1 GPU: --gpus says how many there are"
        )
    draft.set(f"{_SIZE}.prompts_per_step", max(1, generated // group), "per_device_train_batch_size")
    draft.set(f"{_SIZE}.group_size", group, "num_generations")
    if mini < generated:
        draft.set(f"{_SIZE}.mini_batch_size", mini, "per_device_train_batch_size")
    draft.set(f"{_SIZE}.micro_batch_size_per_gpu", per_gpu, "per_device_train_batch_size")
    if given["num_iterations"] > 1:
        draft.set(f"{_SIZE}.num_epochs", given["num_iterations"], "num_iterations")
    if generated % group:
        name = "per_device_train_batch_size"
        draft.lacks(name, f"{generated} completions a step over {num_gpus} GPUs are no groups of {group}: give --gpus")
    if given.num_gpus is not None:
        draft.settings["trainer.devices"] = num_gpus


def updates_per_step(given: Given, draft: Draft) -> int:
    """Return the optimizer steps of TRL in one step here."""
    completions: int = draft.settings[f"{_SIZE}.prompts_per_step"] * draft.settings[f"{_SIZE}.group_size"]
    mini: int = draft.settings.get(f"{_SIZE}.mini_batch_size", completions)
    return max(1, completions // mini) * int(given["num_iterations"])


def write_optimizer(given: Given, draft: Draft) -> None:
    """Write the optimizer and its schedule."""
    name = _OPTIMIZERS.get(given["optim"])
    if name is None:
        draft.lacks("optim", f"not there: {given['optim']}; model.optimizer takes any class of torch.optim")
        name = "torch.optim.AdamW"
    draft.set("model.optimizer.class_path", name, "optim")
    draft.set(f"{_INIT}.lr", float(given["learning_rate"]), "learning_rate")
    draft.set(f"{_INIT}.weight_decay", float(given["weight_decay"]), "weight_decay")
    if "adam_beta1" in given or "adam_beta2" in given:
        draft.settings[f"{_INIT}.betas"] = [float(given["adam_beta1"]), float(given["adam_beta2"])]
    if "adam_epsilon" in given:
        draft.set(f"{_INIT}.eps", float(given["adam_epsilon"]), "adam_epsilon")
    if name == "torch.optim.AdamW":
        draft.settings[f"{_INIT}.fused"] = True


def write_trainer(given: Given, draft: Draft) -> None:
    """Write steps, schedule, validation, checkpoints and loggers, in steps of RL."""
    updates = updates_per_step(given, draft)
    steps = positive(given["max_steps"])
    if isinstance(steps, int):
        draft.set("model.num_steps", max(1, steps // updates), "max_steps")
    elif "num_train_epochs" in given and given["num_train_epochs"] != 1:
        draft.lacks("num_train_epochs", "set model.num_steps: rows x epochs / prompts_per_step; without it, one pass")
    _write_schedule(given, draft, updates)
    draft.set("seed_everything", given["seed"], "seed")
    if given["eval_strategy"] == "steps" and given["eval_steps"]:
        draft.set("model.validation.every_n_steps", max(1, int(given["eval_steps"]) // updates), "eval_steps")
    elif given["eval_strategy"] == "epoch":
        draft.lacks("eval_strategy", "not there: epoch; model.validation.every_n_steps counts steps")
    if given["eval_on_start"]:
        draft.set("model.validation.at_start", True, "eval_on_start")
    if given["save_strategy"] in (None, "steps"):
        draft.set("checkpoint.every_n_steps", max(1, int(given["save_steps"]) // updates), "save_steps")
    else:
        draft.lacks("save_strategy", "not there: a run saves every checkpoint.every_n_steps, and at its end")
    names = given["report_to"]
    for name in names if isinstance(names, list) else [] if names is None else [names]:
        run_name = str(given["run_name"] or given["output_dir"])
        append_logger(draft, str(name), str(given["project"]), run_name, "report_to")


def _write_schedule(given: Given, draft: Draft, updates: int) -> None:
    """Write TRL's default, a line down to 0, or a warm-up; others need a function."""
    kind, warmup = given["lr_scheduler_type"], given["warmup_steps"] or 0
    steps = draft.settings.get("model.num_steps")
    if kind == "linear" and not warmup and steps:
        draft.set("model.lr_scheduler.class_path", "torch.optim.lr_scheduler.LinearLR", "lr_scheduler_type")
        options = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": steps}
    elif kind == "constant_with_warmup" and warmup >= 1:
        draft.set("model.lr_scheduler.class_path", "torch.optim.lr_scheduler.LinearLR", "warmup_steps")
        total = max(1, round(warmup / updates))
        options = {"start_factor": round(1 / total, 6), "total_iters": total}
    else:
        if kind != "constant":
            reason = "the rate stays as it is: give model.lr_scheduler the number of steps, or a function of yours"
            draft.lacking["lr_scheduler_type"] = f"{kind}: {reason}"
        return
    draft.settings.update({f"model.lr_scheduler.init_args.{name}": value for name, value in options.items()})


# ---- data and rewards -----------------------------------------------------------------------------------------------


def write_source(given: Given, draft: Draft) -> None:
    """Write the data set; a script that makes its own has none in its arguments."""
    name = given["dataset_name"]
    if name is None:
        draft.settings["data.train"] = {"class_path": "FileSource", "init_args": {"path": "train.jsonl"}}
        draft.note("dataset_name", "data.train", "the script makes its data set: write it to train.jsonl, or name one")
        return
    options = {"path": name}
    if "dataset_config" in given:
        options["name"] = given["dataset_config"]
    train = {**options, "split": given["dataset_train_split"]}
    if given["dataset_streaming"]:
        train["streaming"] = True
    draft.set("data.train", {"class_path": "HFDatasetSource", "init_args": train}, "dataset_name")
    if given["eval_strategy"] not in (None, "no", False):
        val = {**options, "split": given["dataset_test_split"]}
        draft.set("data.val", {"class_path": "HFDatasetSource", "init_args": val}, "dataset_name")


def write_rewards(given: Given, draft: Draft) -> None:
    """Write rewards in TRL's order, with their weights."""
    names = given["reward_funcs"] or []
    rewards = [_reward(str(name), draft) for name in (names if isinstance(names, list) else [names])]
    if (model := given["reward_model_name_or_path"]) is not None:
        rewards.insert(0, {"class_path": "RewardModel", "init_args": {"path": model}})
    weights = given["reward_weights"]
    for number, reward in enumerate(rewards):
        if isinstance(weights, list) and number < len(weights) and reward:
            reward.setdefault("init_args", {})["weight"] = float(weights[number])
    for reward in filter(None, rewards):
        draft.append("model.rewards", reward)
    if "model.rewards" not in draft.settings:
        draft.append("model.rewards", {"class_path": "MathVerify"})
        draft.note("reward_funcs", "model.rewards", "the script has its rewards in code; MathVerify is for mathematics")


def _reward(name: str, draft: Draft) -> dict[str, Any] | None:
    """Return our reward for a name of ``trl grpo``, or ``None`` where it is an option of the algorithm."""
    if name in ("accuracy_reward", "reasoning_accuracy_reward"):
        return {"class_path": "MathVerify"}
    if name == "think_format_reward":
        return {"class_path": "RegexFormat", "init_args": {"pattern": _THINK}}
    if name == "get_soft_overlong_punishment":
        draft.lacks("reward_funcs", "get_soft_overlong_punishment: DAPO's overlong_buffer, 256 of 1280 tokens in TRL")
        return None
    draft.note(
        "reward_funcs", "model.rewards", f"{name} scores one completion here, not lists: completion, answer, metadata"
    )
    return {"class_path": "FunctionReward", "init_args": {"function": name}}
