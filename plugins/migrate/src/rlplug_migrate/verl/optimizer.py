"""verl's optimizers and learning-rate schedules."""

from __future__ import annotations

from typing import Final

from rlplug_migrate.conversion import Draft, Given
from rlplug_migrate.keys import Key, none, same
from rlplug_migrate.verl.names import ACTOR, OPTIM

_SCHEDULE: Final = "model.lr_scheduler"
_INIT: Final = "model.optimizer.init_args"

KEYS: Final = (
    Key(f"{OPTIM}.lr", "trainer", f"{_INIT}.lr", default=1e-6),
    Key(f"{OPTIM}.weight_decay", "trainer", f"{_INIT}.weight_decay"),
    Key(f"{OPTIM}.betas", "trainer", f"{_INIT}.betas"),
    Key(f"{OPTIM}.optimizer", "trainer", "model.optimizer.class_path", default="AdamW"),
    Key(f"{OPTIM}.optimizer_impl", "trainer", "model.optimizer.class_path", default="torch.optim"),
    Key(f"{OPTIM}.lr_warmup_steps", "trainer", _SCHEDULE, "starts above 0, where verl starts at 0"),
    Key(f"{OPTIM}.lr_warmup_steps_ratio", "trainer", _SCHEDULE),
    Key(f"{OPTIM}.lr_scheduler_type", "trainer", _SCHEDULE, default="constant"),
    Key(f"{OPTIM}.warmup_style", "trainer", _SCHEDULE),
    Key(f"{OPTIM}.min_lr_ratio", "trainer", f"{_SCHEDULE}.init_args.eta_min", default=0.0),
    same(f"{ACTOR}.grad_clip", "trainer", "model.limits.max_grad_norm"),
    *none("trainer", "clips by grad_clip: model.limits.max_grad_norm", f"{OPTIM}.clip_grad", "critic.optim.clip_grad"),
    *none(
        "trainer", "follows from model.num_steps", f"{OPTIM}.total_training_steps", "critic.optim.total_training_steps"
    ),
    *none("trainer", "not there: half a period of the cosine", f"{OPTIM}.num_cycles", "critic.optim.num_cycles"),
    *none("trainer", "further options of an optimizer are its init_args", f"{OPTIM}.override_optimizer_config"),
    *none("trainer", "set model.critic.optimizer and model.critic.lr_scheduler by hand", "critic.optim.*"),
    *none("trainer", "not there: schedules count steps from 0", f"{OPTIM}.zero_indexed_step"),
    *none("trainer", "not there", f"{OPTIM}.*"),
)


def write_optimizers(given: Given, draft: Draft) -> None:
    """Write the optimizers of the policy and the critic, and the policy's schedule."""
    _write_optimizer(given, draft, OPTIM, "model.optimizer")
    if draft.settings["model.algorithm.class_path"] == "PPO":
        _write_optimizer(given, draft, "critic.optim", "model.critic.optimizer")
    _write_schedule(given, draft)


def _write_optimizer(given: Given, draft: Draft, block: str, key: str) -> None:
    where, name = (given.first(f"{block}.{each}", f"{OPTIM}.{each}") for each in ("optimizer_impl", "optimizer"))
    draft.set(f"{key}.class_path", f"{where}.{name}", f"{block}.optimizer")
    draft.set(f"{key}.init_args.lr", given[f"{block}.lr"], f"{block}.lr")
    for option in ("weight_decay", "betas"):
        if f"{block}.{option}" in given:
            draft.set(f"{key}.init_args.{option}", given[f"{block}.{option}"], f"{block}.{option}")
    if f"{where}.{name}" == "torch.optim.AdamW":
        draft.settings[f"{key}.init_args.fused"] = True


def _write_schedule(given: Given, draft: Draft) -> None:
    """Write warm-up or a cosine; both after one another take a scheduler that YAML cannot make."""
    kind = given.first(f"{OPTIM}.lr_scheduler_type", f"{OPTIM}.warmup_style")
    steps, ratio = given["trainer.total_training_steps"], given[f"{OPTIM}.lr_warmup_steps_ratio"] or 0
    warmup = given[f"{OPTIM}.lr_warmup_steps"] or 0
    if warmup <= 0 and ratio and steps:
        warmup = round(ratio * steps)
    if kind == "constant" and warmup > 0:
        draft.set(f"{_SCHEDULE}.class_path", "torch.optim.lr_scheduler.LinearLR", f"{OPTIM}.lr_warmup_steps")
        draft.settings[f"{_SCHEDULE}.init_args.start_factor"] = round(1 / warmup, 6)
        draft.settings[f"{_SCHEDULE}.init_args.total_iters"] = warmup
    elif kind == "cosine" and warmup <= 0 and steps and not ratio:
        draft.set(f"{_SCHEDULE}.class_path", "torch.optim.lr_scheduler.CosineAnnealingLR", f"{OPTIM}.lr_scheduler_type")
        draft.settings[f"{_SCHEDULE}.init_args.T_max"] = steps
        lowest = float(given[f"{OPTIM}.lr"]) * float(given[f"{OPTIM}.min_lr_ratio"])
        draft.settings[f"{_SCHEDULE}.init_args.eta_min"] = lowest
    elif kind != "constant" or ratio:
        reason = "give model.lr_scheduler a function of yours: it needs the number of steps, or warms up and decays"
        for name in ("lr_scheduler_type", "warmup_style", "lr_warmup_steps_ratio"):
            if given[f"{OPTIM}.{name}"]:
                draft.lacks(f"{OPTIM}.{name}", reason)
