"""verl's trainer: devices, steps, validation, loggers, checkpoints and profiles."""

from __future__ import annotations

from typing import Any, Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import OMIT, Key, none, positive, same
from rlplug_migrate.loggers import append_logger
from rlplug_migrate.verl.names import ACTOR

_PROFILER: Final = "global_profiler"

KEYS: Final = (
    same("trainer.nnodes", "trainer", "trainer.num_nodes", default=1),
    same("trainer.n_gpus_per_node", "trainer", "trainer.devices", default=8),
    Key("trainer.total_training_steps", "trainer", "model.num_steps", read=positive),
    Key("trainer.total_epochs", "trainer", "model.num_steps", "counts steps: rows x epochs / prompts_per_step"),
    Key("trainer.test_freq", "trainer", "model.validation.every_n_steps"),
    Key("trainer.val_before_train", "trainer", "model.validation.at_start", default=True),
    Key("trainer.device", "trainer", "trainer.accelerator", read=lambda value: OMIT if value == "cuda" else value),
    Key("trainer.experiment_name", "logger", "run.dir", default="gsm8k"),
    Key("trainer.project_name", "logger", "trainer.logger", default="verl_examples"),
    Key("trainer.logger", "logger", "trainer.logger"),
    Key("trainer.save_freq", "checkpoint", "checkpoint.every_n_steps", "a run also saves at its end"),
    Key("trainer.max_actor_ckpt_to_keep", "checkpoint", "checkpoint.keep", read=positive),
    Key(
        f"{ACTOR}.checkpoint.async_save",
        "checkpoint",
        "checkpoint.asynchronous",
        read=lambda value: True if value else OMIT,
    ),
    Key(f"{_PROFILER}.steps", "tuning", "profile.steps", "one step, or a range"),
    Key(f"{_PROFILER}.tool", "tuning", "profile.tool"),
    Key(f"{ACTOR}.profiler.all_ranks", "tuning", "profile.ranks"),
    *none("trainer", "sets itself: each GPU gets the same number of tokens", "trainer.balance_batch"),
    *none("trainer", "rlplug validate", "trainer.val_only"),
    *none(
        "logger",
        "samples.jsonl has them: run.samples_per_step",
        "trainer.log_val_generations",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
    ),
    *none("checkpoint", "rlplug fit --resume RUN", "trainer.resume_mode", "trainer.resume_from_path"),
    *none(
        "checkpoint",
        "follows from run.dir: each run has a folder",
        "trainer.default_local_dir",
        "trainer.default_hdfs_dir",
        "trainer.del_local_ckpt_after_load",
    ),
    *none(
        "checkpoint",
        "a checkpoint has all: policy, critic, optimizers and the state of the run",
        "*.checkpoint.*",
        "trainer.max_critic_ckpt_to_keep",
    ),
    *none(
        "checkpoint",
        "trainer.callbacks takes Lightning's, ModelCheckpoint among them",
        "trainer.checkpoint_callback_class",
    ),
    *none("trainer", "trainer.max_time stops in time", "trainer.esi_redundant_time"),
    *none(
        "trainer",
        "model.partial_rollout.asynchronous, with an engine on devices of its own",
        "trainer.v1.*",
        "async_training.*",
    ),
    *none(
        "trainer",
        "not there: no Ray in a run; rlplug launch can start one through it",
        "ray_kwargs.*",
        "ray_init.*",
        "trainer.ray_*",
    ),
    *none(
        "trainer",
        "not there: verl's own means of moving data",
        "transfer_queue.*",
        "trainer.use_v1",
        "trainer.use_legacy_worker_impl",
    ),
    *none(
        "trainer",
        "sets itself: trainer and engine share GPUs unless the engine has its own",
        "actor_rollout_ref.hybrid_engine",
    ),
    *none("trainer", "trainer.strategy.init_args.timeout_s", "actor_rollout_ref.nccl_timeout"),
    *none("trainer", "not there: a rollout that is read from a file", "skip.*"),
    *none(
        "tuning", "profile.steps, tool and ranks hold for the whole run", "*profiler.*", "*.profiler", "*npu_profile*"
    ),
    *none("trainer", "not there", "trainer.*", "algorithm.*", "critic.*", f"{ACTOR}.*", "actor_rollout_ref.*"),
)


def write_trainer(given: Given, draft: Draft) -> None:
    """Write what validation and the number of steps follow from."""
    if (
        "trainer.total_epochs" in given
        and "model.num_steps" not in draft.settings
        and given["trainer.total_epochs"] != 1
    ):
        draft.lacks(
            "trainer.total_epochs",
            f"set model.num_steps: rows x {given['trainer.total_epochs']} / prompts_per_step; without it, one pass",
        )
    if "data.val_files" in given:
        if isinstance(every := positive(given["trainer.test_freq"]), int):
            draft.set("model.validation.every_n_steps", every, "trainer.test_freq")
        if given["trainer.val_before_train"]:
            draft.set("model.validation.at_start", True, "trainer.val_before_train")
    draft.set("run.dir", f"runs/{given['trainer.experiment_name']}", "trainer.experiment_name")


def write_loggers(given: Given, draft: Draft) -> None:
    """Write loggers; the terminal, metrics.jsonl and TensorBoard are always there."""
    names = given["trainer.logger"]
    for name in names if isinstance(names, list) else [] if names is None else [names]:
        project, experiment = given["trainer.project_name"], given["trainer.experiment_name"]
        append_logger(draft, str(name), str(project), str(experiment), "trainer.logger")


def write_checkpoints(given: Given, draft: Draft) -> None:
    """Write how often the run is saved."""
    every = given["trainer.save_freq"]
    if isinstance(every, int) and every > 0:
        draft.set("checkpoint.every_n_steps", every, "trainer.save_freq")
    elif every is not None:
        draft.lacks("trainer.save_freq", f"not there: {every}; a run saves every 50 steps, unless told otherwise")


def write_profile(given: Given, draft: Draft) -> None:
    """Write the steps to profile; verl lists them, and ours is a range."""
    steps: Any = given[f"{_PROFILER}.steps"]
    if not steps or given[f"{_PROFILER}.tool"] not in ("torch", "nsys"):
        draft.lacks(f"{_PROFILER}.tool", "not there: profile.tool is torch or nsys, and needs profile.steps")
        return
    chosen = sorted(steps) if isinstance(steps, list) else [steps]
    draft.set("profile.tool", given[f"{_PROFILER}.tool"], f"{_PROFILER}.tool")
    draft.set("profile.steps", chosen[0] if len(chosen) == 1 else f"{chosen[0]}-{chosen[-1]}", f"{_PROFILER}.steps")
    if given[f"{ACTOR}.profiler.all_ranks"]:
        draft.set("profile.ranks", "all", f"{ACTOR}.profiler.all_ranks")
