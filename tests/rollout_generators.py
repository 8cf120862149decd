"""Rollout generators on an engine driver, without the rest of a run."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlplug.distributed.offload import Offload
from rlplug.interfaces import Placement
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.plugin_manager import plugins
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.engine_driver import EngineDriver, SyncedPolicy
from rlplug.rollout.source import RolloutGenerator
from rlplug.rollout.trajectory import to_samples
from rlplug.rollout.turns.environment_calls import EnvironmentCalls
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.weight_sync.buckets import policy_buckets

CPU = torch.device("cpu")
TURNS = TurnOptions(max_turns=8, max_tokens_per_turn=3, step_deadline_s=20)


class TextlessTokenizer:
    added_tokens_decoder = MappingProxyType({})
    all_special_tokens = ()

    def batch_decode(self, rows, skip_special_tokens):
        return ["" for _ in rows]


def generator_of(driver, tokenizer=None, make_environment=None, options=None, gather=list):
    """Return the generator on a driver, with observations that are plain text."""
    tokenizer, options = tokenizer or TextlessTokenizer(), options or TurnOptions()
    observations = ObservationTokens(tokenizer, chat=False)

    def make_rules():
        if make_environment is None:
            return TurnRules(options)
        end_tokens = driver.spec.eos_token_ids
        environments = EnvironmentCalls(make_environment, tokenizer, end_tokens, options, observations)
        return TurnRules(options, environments, observations)

    return RolloutGenerator(driver, tokenizer, make_rules, gather)


def samples_of(trajectories, completions, tokenizer=None):
    """Return samples of one turn each."""
    for trajectory, completion in zip(trajectories, completions, strict=True):
        trajectory.add_completion(completion, ends_turn=True)
        trajectory.finish_reason = completion.finish_reason
    return to_samples(trajectories, tokenizer or TextlessTokenizer(), has_environment=False)


@pytest.fixture
def make_generator(model_folder):
    """Return what makes a generator on an engine with a tiny model."""
    folder = str(model_folder("llama"))
    config = ModelConfig(path=folder, dtype="float32")
    tokenizer = load_tokenizer(config)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def make(engine, environment=None, options=TURNS):
        spec = load_spec(config, tokenizer)
        driver = EngineDriver(
            engine=engine,
            policy=SyncedPolicy(spec, lambda: policy_buckets(policy, spec, 1 << 14), plugins().hook),
            placement=Placement(CPU, 0, 1),
            offload=Offload(),
            sleeps=False,
            max_restarts=2,
        )
        generator = generator_of(driver, tokenizer, environment, options if environment else None)
        generator.policy = policy
        return generator

    return make
