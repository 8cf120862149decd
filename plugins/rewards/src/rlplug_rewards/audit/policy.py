"""Completions of a policy for an audit, by the rollout engine and without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from rlplug.config import RunConfig
from rlplug.data.chat_template import render_all
from rlplug.data.rows import PromptRow
from rlplug.data.tokenizing import tokenize_all
from rlplug.distributed.offload import Offload
from rlplug.errors import ConfigError
from rlplug.interfaces.rollout import Placement, RolloutEngine
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.loading import load_model
from rlplug.plugin_manager import plugins
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.engine_driver import EngineDriver, SyncedPolicy
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.trajectory import new_trajectories, to_samples
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.setup.inputs import read_inputs
from rlplug.types import Prompt, SamplingParams
from rlplug.weight_sync.buckets import weight_buckets

KEY: Final = "--policy"
VERSION: Final = 1
"""Number of the weights that the engine gets."""


def write_completions(
    place: str, engine: RolloutEngine | None, prompts: Sequence[Prompt], num_samples: int, max_new_tokens: int
) -> list[list[str]]:
    """Return ``num_samples`` completions of each prompt, at temperature 1, in the policy's chat template.

    Args:
        place: Folder of a Hugging Face model, or its name on the Hub.
        engine: Rollout engine, not started; transformers' own for ``None``.
        prompts: The prompts.
        num_samples: Completions of each.
        max_new_tokens: Longest completion, in tokens.

    Raises:
        ConfigError: The files cannot be used, the engine cannot run the policy here, or a prompt is too long.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    unused: Any = None  # a search does not train
    model = ModelConfig(place, dtype="bfloat16" if device.type == "cuda" else "float32")
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    config = RunConfig(model, algorithm=unused, optimizer=unused, rollout=engine, sampling=sampling)
    inputs, placement = read_inputs(config), Placement(device, 0, 1)
    config.engine.check(inputs.spec)
    if config.engine.ranks_per_engine > 1:
        raise ConfigError(f"{type(config.engine).__name__} runs on several ranks, and an audit is one: take another.")
    config.engine.check_sampling(sampling, "sampling")
    config.engine.prepare(inputs.spec, placement)
    asked = _with_tokens(prompts, inputs.tokenizer, inputs.spec.max_context - max_new_tokens)
    trajectories = new_trajectories(asked, range(len(asked)), num_samples, "audit")
    buckets = lambda: weight_buckets(load_model(model, KEY), inputs.spec.dtype)  # noqa: E731
    policy = SyncedPolicy(inputs.spec, buckets, plugins().hook)
    driver = EngineDriver(config.engine, policy, placement, Offload(), sleeps=False, max_restarts=0)
    try:
        driver.sync_weights(VERSION)
        ranks = EngineRanks(placement, 1, communicates=False)
        AgentLoop(trajectories, sampling, TurnRules(TurnOptions()), inputs.spec, VERSION, ranks).run(driver)
    finally:
        driver.close()
    texts = [sample.completion for sample in to_samples(trajectories, inputs.tokenizer, has_environment=False)]
    return [texts[first : first + num_samples] for first in range(0, len(texts), num_samples)]


def _with_tokens(prompts: Sequence[Prompt], tokenizer: Any, most: int) -> list[Prompt]:
    """Return prompts with the policy's tokens, in its chat template where it has one."""
    rows = [
        PromptRow(each.uid, [dict(message) for message in each.messages] or each.text, None, {}) for each in prompts
    ]
    is_chat = bool(tokenizer.chat_template)
    texts = render_all(rows, tokenizer, None) if is_chat else [each.text for each in prompts]
    tokens = tokenize_all([each.uid for each in prompts], texts, tokenizer, not is_chat, most)
    long = [prompt.uid for prompt, ids in zip(prompts, tokens, strict=True) if not 0 < len(ids) <= most]
    if long:
        raise ConfigError(f"{long[0]}: with the policy's tokenizer the prompt has no tokens, or more than {most}.")
    return [Prompt(prompt.uid, ids, prompt.text, None, {}) for prompt, ids in zip(prompts, tokens, strict=True)]
