"""Checks that algorithm, critic, rewards, validation and batch of a training run agree.

Each raises a ``ConfigError`` that names the key and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transformers import PreTrainedTokenizerBase

from rlplug.config import RunConfig
from rlplug.errors import ConfigError
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.config import MakeTokenizer, require_same_tokens
from rlplug.models.critic import CriticConfig
from rlplug.models.hf_files import read_config
from rlplug.models.packing_checks import check_long_sequences
from rlplug.training.batch_plan import BatchPlan
from rlplug.training.validation.config import ValidationConfig
from rlplug.types import SamplingParams

LEAST_CHOICE: Final = 0.01
"""Temperature or ``top_p`` below which a completion is as good as the most probable one."""


def check_training(
    config: RunConfig,
    batch: BatchPlan,
    total_steps: int,
    longest: int,
    sequence_size: int,
    tokenizer: PreTrainedTokenizerBase,
    make_tokenizer: MakeTokenizer,
    has_val_prompts: bool,
) -> None:
    """Check that the parts of a training run agree, as :func:`check_models` does its models.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    check_sampling(config.sampling, config.validation, has_val_prompts)
    check_validation(config)
    if config.environment is None and not any(reward.weight for reward in config.rewards):
        raise ConfigError("model.rewards: every weight is 0, so nothing is rewarded. Give one a weight, as 1.")
    if any(reward.compares_group or reward.scales_group for reward in config.rewards):
        from rlplug.interfaces.checks.reward_problems import check_group_rewards

        validation = config.validation
        validates = has_val_prompts and (validation.at_start or validation.every_n_steps)
        check_group_rewards(config.rewards, batch.group_size, validation.num_samples if validates else None)
    check_algorithm(config.algorithm, batch, config.critic, config.reference, total_steps)
    trunk = None if config.critic is None else config.critic.trunk
    models = {"policy": config.policy, "reference": config.reference, "critic.trunk": trunk}
    check_models(models, tokenizer, make_tokenizer, longest, sequence_size)


def check_sampling(sampling: SamplingParams, validation: ValidationConfig, has_val_prompts: bool) -> None:
    """Refuse training on one possible completion of each prompt, and validation without prompts."""
    copies = {
        "temperature": sampling.temperature < LEAST_CHOICE,
        "top_k": sampling.top_k == 1,
        "top_p": sampling.top_p < LEAST_CHOICE,
    }
    for option in (option for option, is_so in copies.items() if is_so):
        raise ConfigError(
            f"model.sampling.{option} is {getattr(sampling, option):g}: completions of a prompt would all be the same, "
            f"and nothing could be learned from comparing them. Set it to {'0 (no limit)' if option == 'top_k' else 1}."
        )
    if not has_val_prompts and (validation.at_start or validation.every_n_steps):
        raise ConfigError(
            "model.validation asks for validation, and data.val is not set: name a source of held-out prompts there, "
            "or set model.validation.every_n_steps to null and at_start to false."
        )


def check_validation(config: RunConfig) -> None:
    """Refuse a validation beside the training where nothing is generated beside it."""
    if not config.validation.beside_training:
        return
    partial, instead = config.partial_rollout, "or set model.validation.beside_training to false"
    if partial is None or not partial.asynchronous:
        raise ConfigError(
            "model.validation.beside_training is true, and generation and update take turns: set "
            f"model.partial_rollout.asynchronous to true, with an engine on GPUs of its own, {instead}."
        )
    if partial.streams:
        raise ConfigError(
            "model.validation.beside_training is true, and model.partial_rollout.max_staleness is 0, so nothing is "
            f"generated while the weights change: set max_staleness to 1 or more, {instead}."
        )


def check_algorithm(
    algorithm: Algorithm, plan: BatchPlan, critic: CriticConfig | None, reference: ModelConfig | None, num_steps: int
) -> None:
    """Refuse a run that lacks what the algorithm needs, or configures what it does not use."""
    name, needs = type(algorithm).__name__, algorithm.needs
    if needs.groups and plan.group_size < 2:
        raise ConfigError(
            f"{name} compares the completions of a prompt, and model.batch.group_size is {plan.group_size}: give at "
            "least 2; 8 is usual."
        )
    if needs.critic and critic is None:
        raise ConfigError(f"{name} needs a critic: set model.critic; `critic: {{}}` takes every default.")
    if needs.critic and type(algorithm).value_loss is Algorithm.value_loss:
        raise ConfigError(f"{name} needs a critic and does not say how it learns: its class lacks value_loss.")
    if critic is not None and not needs.critic:
        raise ConfigError(f"{name} uses no critic: remove model.critic, or take an algorithm that does, such as PPO.")
    if critic is not None and critic.warmup_steps >= num_steps:
        raise ConfigError(
            f"model.critic.warmup_steps is {critic.warmup_steps} and the run has {num_steps} steps: the policy would "
            "never train. Lower it, or raise model.num_steps."
        )
    if reference is not None and not needs.reference_policy:
        raise ConfigError(
            f"{name} would not use model.reference as it is configured: remove it, or give the algorithm a "
            "kl_coefficient above 0."
        )


def check_models(
    models: Mapping[str, ModelConfig | None],
    tokenizer: PreTrainedTokenizerBase,
    make_tokenizer: MakeTokenizer,
    longest: int,
    sequence_size: int,
) -> None:
    """Refuse models that cannot be trained on the run's sequences, or beside the policy on its tokens.

    ``models`` are by key below ``model``; ``longest`` is the tokens of the longest possible sequence, and
    ``sequence_size`` the ranks that share a row.

    Raises:
        ConfigError: The message names the key and the fix.
    """
    for name, config in models.items():
        if config is None:
            continue
        key = f"model.{name}"
        if name != "policy":
            require_same_tokens(config, key, tokenizer, make_tokenizer)
        text_config = read_config(config.path, key).get_text_config()
        check_long_sequences(text_config, config.attn_implementation, key, longest, sequence_size)


def check_streamed_prompts(config: RunConfig, is_streamed: bool) -> None:
    """Refuse what needs to know all training prompts, when they are read while training."""
    if is_streamed and config.num_steps is None:
        raise ConfigError("data.train streams, and nobody has counted its prompts: set model.num_steps.")
    if is_streamed and config.partial_rollout is not None:
        raise ConfigError(
            "model.partial_rollout finds the prompts of groups in flight by their uid, and data.train streams, which "
            "keeps no prompts: set streaming to false, or remove model.partial_rollout."
        )
