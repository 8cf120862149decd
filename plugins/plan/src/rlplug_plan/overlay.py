"""What the plan recommends, as a configuration to lay over the run's own: ``rlplug plan --write FILE``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from rlplug.errors import ConfigError
from rlplug_plan.decisions import Decisions
from rlplug_plan.inputs import MemoryInputs
from rlplug_plan.levers import GPUS, OPTIMIZATIONS, STRATEGY, TRAINING
from rlplug_plan.recommendations import recommendations
from rlplug_plan.remedies import ON_SHORTFALL, Setting, find_remedies
from rlplug_plan.resize import ENGINE_OPTIONS
from rlplug_plan.stand_ins import YOUR_PROMPTS, YOUR_REWARD, StandIn, at

HEADER: Final = "# Written by rlplug plan: lay it over the configuration that was planned, with a further -c.\n"
CLASSES: Final = (ENGINE_OPTIONS, STRATEGY)
"""Keys of options that a file names beside the class that takes them."""
IN_PLACE_OF: Final = {
    "GradientCheckpointing": {"GradientCheckpointing", "SelectiveCheckpointing"},
    "FusedLogprobs": {"FusedLogprobs", "EntropyChunking", "EntropyCheckpointing"},
}
"""What an optimization replaces in a run that has it."""


def check_path(path: Path) -> None:
    """Refuse a file that exists, before anything is planned."""
    if path.exists():
        raise ConfigError(f"--write {path}: the file exists, and is not overwritten: remove it, or name another.")
    if not path.parent.is_dir():
        raise ConfigError(f"--write {path}: there is no folder {path.parent}.")


def write_overlay(path: Path, decisions: Decisions, configured: Mapping[str, Any]) -> list[str]:
    """Write the smallest change, if one is needed, and what is recommended beside it; return the keys that changed.

    Args:
        path: A file that does not exist.
        decisions: What was planned.
        configured: The run's resolved configuration, as ``--print_config`` shows it.

    Raises:
        ConfigError: It does not fit, and what would make it fit is not the plan's to choose, or the file is there.
    """
    keys = overlay_keys(decisions, configured)
    check_path(path)
    path.write_text(HEADER + yaml.safe_dump(_nested(keys), sort_keys=False))
    return _settings(keys)


def write_run(
    path: Path, decisions: Decisions, configured: Mapping[str, Any], run: Mapping[str, Any], stand_in: StandIn
) -> list[str]:
    """Write a whole run: one that was planned without a model or data, with the same as :func:`write_overlay`.

    What its files give in place of which a stand-in was planned, it keeps.

    Args:
        path: A file that does not exist.
        decisions: What was planned.
        configured: The run's resolved configuration.
        run: The same without defaults.
        stand_in: What it was planned with, in whose place the file names what is the user's.

    Raises:
        ConfigError: As of :func:`write_overlay`.
    """
    keys = overlay_keys(decisions, configured)
    yours = {"model.policy.path": stand_in.policy, **stand_in.given}
    if yours["data.train"] is None:
        yours["data.train"] = {"class_path": "FileSource", "init_args": {"path": YOUR_PROMPTS}}
    if stand_in.has_no_reward:
        yours["model.rewards"] = [{"class_path": "FunctionReward", "init_args": {"function": YOUR_REWARD}}]
    content = copy.deepcopy(dict(run))
    for key, value in {**yours, **keys}.items():
        _set(content, key, value)
    check_path(path)
    path.write_text(stand_in.header(path) + yaml.safe_dump(content, sort_keys=False))
    return _settings(keys)


def overlay_keys(decisions: Decisions, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from the run's values, by key, with the classes that options need beside them."""
    values = overlay_values(decisions)
    keys: dict[str, Any] = {key: value for key, value in values.items() if key != OPTIMIZATIONS}
    if OPTIMIZATIONS in values:
        keys[OPTIMIZATIONS] = with_optimizations(at(configured, OPTIMIZATIONS) or [], values[OPTIMIZATIONS])
    for options in CLASSES:
        name = options.removesuffix("init_args") + "class_path"
        if any(key.startswith(options) for key in keys):
            keys[name] = at(configured, name)
    return keys


def _settings(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if not key.endswith(".class_path") or key == "model.optimizer.class_path"]


def overlay_values(decisions: Decisions) -> dict[str, Any]:
    """Return the values that differ from the run's, by key; of :data:`OPTIMIZATIONS` the list of settings to add."""
    facts, settings = decisions.plan.facts, list[Setting]()
    if not decisions.plan.fits:
        settings = list(_chosen(facts))
    added = [setting for setting in settings if setting.key == OPTIMIZATIONS]
    values = {setting.key: setting.value for setting in settings if setting.key != OPTIMIZATIONS}
    recommended = {each.key: each.value for each in recommendations(facts) if each.value is not None}
    values |= {key: value for key, value in recommended.items() if key in values or not _has(facts, key, value)}
    if facts.engine_can_sleep:
        values.setdefault("model.memory.sleep_between_rollouts", facts.sleeps)
    return values | ({OPTIMIZATIONS: added} if added else {})


def _chosen(facts: MemoryInputs) -> Iterable[Setting]:
    remedies = find_remedies(facts)
    others = {lever.name for lever in (*TRAINING, GPUS)}
    if not remedies or others & {setting.name for setting in remedies[0].settings}:
        raise ConfigError(
            "--write: nothing makes the run fit that trains the same on as many GPUs, so nothing was written: set one "
            "of the alternatives that rlplug plan prints, and plan again."
        )
    return [setting for setting in remedies[0].settings if setting.key != ON_SHORTFALL] or [
        Setting("warn", ON_SHORTFALL, "warn", "")
    ]


def _has(facts: MemoryInputs, key: str, value: Any) -> bool:
    """Return whether the run has a value already."""
    if key == "model.memory.offload":
        return bool(facts.offload == value)
    sizes, of_critic = facts.sizes, facts.sizes.of_critic
    has = {
        "model.batch.micro_batch_size_per_gpu": sizes.micro_batch_size,
        "model.batch.micro_batch_size_per_gpu_forward": sizes.micro_batch_size_forward or sizes.micro_batch_size,
        "model.batch.max_tokens_per_gpu": sizes.max_tokens.get("update"),
        "model.batch.max_tokens_per_gpu_forward": sizes.max_tokens.get("forward"),
        "model.critic.max_tokens_per_gpu": of_critic.max_tokens.get("update"),
        "model.critic.max_tokens_per_gpu_forward": of_critic.max_tokens.get("forward"),
    }
    return key in has and has[key] == value


def with_optimizations(configured: list[Any], added: Iterable[Setting]) -> list[Any]:
    """Return a run's list of optimizations with those that a remedy adds, which replace what they exclude."""
    entries = [entry if isinstance(entry, dict) else {"class_path": entry} for entry in configured]
    for setting in added:
        replaced = IN_PLACE_OF.get(setting.value, {setting.value})
        entries = [entry for entry in entries if entry["class_path"].rpartition(".")[2] not in replaced]
        entries.append({"class_path": setting.value})
    return entries


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key in sorted(keys, key=lambda key: (key.count("class_path") == 0, key)):
        _set(content, key, keys[key])
    return content


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *folders, last = key.split(".")
    for folder in folders:
        content = content.setdefault(folder, {})
    content[last] = value
    if value is None:  # the default
        del content[last]
