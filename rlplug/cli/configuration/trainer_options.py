"""Options of Lightning's trainer: which the RL loop honours, and which it refuses, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from jsonargparse import Namespace

from rlplug.errors import ConfigError, shorten

TRAINER_DEFAULTS: Final[Mapping[str, Any]] = {
    "strategy": {"class_path": "rlplug.distributed.strategy.RLFSDP2Strategy"},
    "accelerator": "auto",
    "devices": 1,
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
"""Options that differ from Lightning's own defaults."""

HONOURED: Final = (
    *("accelerator", "benchmark", "callbacks", "detect_anomaly", "deterministic", "devices", "enable_autolog_hparams"),
    *("enable_progress_bar", "inference_mode", "logger", "max_time", "num_nodes", "plugins", "strategy"),
)
"""Options that do what Lightning's documentation says."""

_NO_BATCHES: Final = "the loop has no batches of data to count; "
_STEPS: Final = "it counts batches or optimizer steps, and a run is as long as model.num_steps says; set that"
REFUSED: Final[Mapping[str, str]] = {
    "accumulate_grad_batches": "micro-batches are those of model.batch.max_tokens_per_gpu; set that",
    "barebones": "it takes away the hooks that a run needs; remove it",
    "check_val_every_n_epoch": "set model.validation.every_n_steps",
    "default_root_dir": "set run.dir",
    "enable_checkpointing": "checkpoints are those of `checkpoint`, and of a ModelCheckpoint in trainer.callbacks",
    "enable_model_summary": "there are no weights to count when Lightning would print it; see rlplug plan",
    "fast_dev_run": "set model.num_steps to 1",
    "gradient_clip_algorithm": "gradients are clipped to a norm; set model.limits.max_grad_norm",
    "gradient_clip_val": "set model.limits.max_grad_norm",
    "limit_predict_batches": "there is no predict; remove it",
    "limit_test_batches": "there is no test; remove it",
    "limit_train_batches": f"{_NO_BATCHES}set model.num_steps",
    "limit_val_batches": f"{_NO_BATCHES}set data.val.init_args.limit",
    "log_every_n_steps": "loggers get every step; remove it",
    **dict.fromkeys(("max_epochs", "max_steps", "min_epochs", "min_steps"), _STEPS),
    "model_registry": "nothing uploads checkpoints to it; remove it",
    "num_sanity_val_steps": "set model.validation.at_start to true, which scores the held-out prompts first",
    "overfit_batches": f"{_NO_BATCHES}set data.train.init_args.limit",
    "precision": "set model.policy.dtype",
    "profiler": "set profile.steps, which writes a trace of whole steps",
    "reload_dataloaders_every_n_epochs": f"{_NO_BATCHES}remove it",
    "sync_batchnorm": "language models have no batch norm; remove it",
    "use_distributed_sampler": "every rank takes its own share of the same prompts; remove it",
    "val_check_interval": "set model.validation.every_n_steps",
}
"""Options that the loop does not honour, and what to do instead."""

REFUSED_CALLBACKS: Final[Mapping[str, str]] = {
    "BackboneFinetuning": "parameters are sharded before it could freeze some",
    "BaseFinetuning": "parameters are sharded before it could freeze some",
    "BatchSizeFinder": "set model.batch.max_tokens_per_gpu",
    "EMAWeightAveraging": "it copies unsharded weights",
    "GradientAccumulationScheduler": "set model.batch.max_tokens_per_gpu",
    "LearningRateFinder": "it runs batches that the loop does not have",
    "ModelPruning": "parameters are sharded before it could prune some",
    "OnExceptionCheckpoint": "a step that failed leaves nothing whole to save; see checkpoint.every_n_steps",
    "SpikeDetection": "it needs a loss of each batch; see model.limits.on_nonfinite",
    "StochasticWeightAveraging": "it copies unsharded weights",
    "ThroughputMonitor": "throughput/tokens_per_s is in the metrics already",
    "WeightAveraging": "it copies unsharded weights",
}
"""Callbacks of Lightning that the loop cannot serve, and why or what to do instead."""

REFUSED_CHECKPOINT_ARGUMENTS: Final[Mapping[str, str]] = {
    "train_time_interval": "set every_n_train_steps, which counts RL steps",
    "save_on_exception": "a step that failed leaves nothing whole to save",
    "save_weights_only": "such a checkpoint could not be resumed; run.export_policy writes the policy alone",
    "save_on_train_epoch_end": "a run is one epoch to Lightning; set every_n_train_steps or monitor",
    "every_n_epochs": "a run is one epoch to Lightning; set every_n_train_steps, which counts RL steps",
}
"""Arguments of ``ModelCheckpoint`` that have no meaning here."""


def check_trainer_options(trainer: Namespace, defaults: Mapping[str, Any]) -> None:
    """Refuse options of the trainer that the RL loop would ignore.

    Args:
        trainer: The resolved options.
        defaults: The default of each.

    Raises:
        ConfigError: The message names the key, the value and what to write instead.
    """
    for name, value in vars(trainer).items():
        default = defaults.get(name)
        asks_nothing = value is False and default is None
        if name in REFUSED and value != default and not asks_nothing:
            raise ConfigError(
                f"trainer.{name} is {shorten(value)}, which the RL loop does not follow: {REFUSED[name]}."
            )
    max_time = trainer.get("max_time")
    if max_time is not None and not re.search("[1-9]", str(max_time)):
        raise ConfigError(f"trainer.max_time is {shorten(max_time)}, no time: write DD:HH:MM:SS, as 00:02:00:00.")
    callbacks = trainer.get("callbacks")
    callbacks = callbacks if isinstance(callbacks, list) else [] if callbacks is None else [callbacks]
    for index, callback in enumerate(callbacks):
        _check_callback(f"trainer.callbacks[{index}]", callback)


def _check_callback(key: str, callback: Any) -> None:
    name = str(callback.class_path).rpartition(".")[2]
    if reason := REFUSED_CALLBACKS.get(name):
        raise ConfigError(f"{key} is {name}, which does not work with the RL loop: {reason}. Remove it.")
    if name == "ModelCheckpoint":
        for argument, reason in REFUSED_CHECKPOINT_ARGUMENTS.items():
            if (value := callback.init_args.get(argument)) not in (None, False):
                raise ConfigError(f"{key}: ModelCheckpoint's {argument} is {shorten(value)}: {reason}.")
