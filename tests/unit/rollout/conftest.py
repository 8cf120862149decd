"""Generators on real engines, for tests of the agent loop and of partial rollouts."""

from __future__ import annotations

import pytest
import torch
from rollout_generators import generator_of
from transformers import AutoModelForCausalLM

from rlplug.distributed.offload import Offload
from rlplug.interfaces import Placement
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer
from rlplug.plugin_manager import plugins
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.engine_driver import EngineDriver, SyncedPolicy
from rlplug.weight_sync.buckets import policy_buckets

CPU = torch.device("cpu")
TURNS = TurnOptions(max_turns=8, max_tokens_per_turn=3, step_deadline_s=20)


@pytest.fixture
def make_generator(model_folder):
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
            offload=Offload("none", CPU, [policy], [], []),
            sleeps=False,
            max_restarts=2,
        )
        generator = generator_of(driver, tokenizer, environment, options if environment else None)
        generator.policy = policy
        return generator

    return make
