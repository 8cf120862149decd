"""What the engine of the core has beyond the checks of every engine, which are in test_conformance.py."""

from __future__ import annotations

import pytest
import torch
from rlplug_devkit.padded_rows import PaddedRows
from rollout_generators import samples_of

from rlplug.errors import ConfigError, RunError
from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack
from rlplug.rollout.trajectory import new_trajectories
from rlplug.types import Prompt, Request, SamplingParams, StepBatch
from rlplug.weight_sync.buckets import weight_buckets

FAMILIES = ["llama", "llama_tied", "qwen2", "gpt2"]
PROMPTS = [(3, 4), (5,), (6, 7, 8, 9, 10, 11, 12), (0, 2, 0), (31, 30, 29, 28)]
"""Of several lengths; one holds the padding token, which there is a token like any other."""


def trajectories_of(prompts, num_samples=1, key="run"):
    tasks = [Prompt(uid=str(i), token_ids=prompt, text="") for i, prompt in enumerate(prompts)]
    return new_trajectories(tasks, range(len(tasks)), num_samples, key)


def requests_of(prompts, num_samples=1, key="run"):
    return [trajectory.request(None) for trajectory in trajectories_of(prompts, num_samples, key)]


def tokens_of(completions):
    return [completion.token_ids.tolist() for completion in completions]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(12),
        SamplingParams(12, temperature=0.7),
        SamplingParams(12, top_p=0.8),
        SamplingParams(12, top_k=5),
        SamplingParams(12, temperature=0.7, top_p=0.8, top_k=5),
        SamplingParams(12, temperature=0),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_trainer(family, sampling, model_folder, load_policy, start_engine):
    policy = load_policy(model_folder(family))
    engine = start_engine(model_folder(family), policy)
    requests = requests_of(PROMPTS, num_samples=6)
    samples = samples_of(trajectories_of(PROMPTS, 6), engine.generate(requests, sampling))
    batch = PaddedRows.of(StepBatch.from_samples(samples))
    trainer = policy_forward(policy.train(), pack(batch.flat()), sampling, "none").tokens.sampled_logprobs
    assert batch.response_mask.sum() > 100
    assert trainer.std() > 0.1  # not all the same
    torch.testing.assert_close(trainer, batch.trained(batch.rollout_logprobs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_learned_positions_do_not_depend_on_the_rest_of_the_batch(temperature, model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("gpt2"), load_policy(model_folder("gpt2")))
    sampling, requests = SamplingParams(10, temperature), requests_of([*PROMPTS, (5,) * 30], num_samples=3)
    together = engine.generate(requests, sampling)
    alone = [engine.generate([request], sampling)[0] for request in requests]
    assert tokens_of(together) == tokens_of(alone)


@pytest.mark.parametrize("max_batch_size", [1, 2, 7, 15])
def test_batch_size_changes_nothing(max_batch_size, model_folder, load_policy, start_engine):
    policy, requests = load_policy(model_folder("llama")), requests_of(PROMPTS, num_samples=3)
    whole = start_engine(model_folder("llama"), policy).generate(requests, SamplingParams(10))
    split = start_engine(model_folder("llama"), policy, max_batch_size=max_batch_size)
    assert tokens_of(split.generate(requests, SamplingParams(10))) == tokens_of(whole)


def test_shorter_completions_are_the_beginning_of_longer_ones(model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("llama"), load_policy(model_folder("llama")))
    requests = [Request(str(seed), (3, 4), seed) for seed in (5, 6, 7, 2**62)]
    longer = tokens_of(engine.generate(requests, SamplingParams(12)))
    assert tokens_of(engine.generate(requests, SamplingParams(4))) == [tokens[:4] for tokens in longer]


def test_refusals_say_what_to_do(model_folder, load_policy, start_engine):
    policy = load_policy(model_folder("llama"))
    engine = start_engine(model_folder("llama"), policy)
    with pytest.raises(RunError, match=r"run/1/0: its prompt has 32 tokens, .* ends at 32: shorten it"):
        engine.generate(requests_of([(5,), (5,) * 32]), SamplingParams(10))
    weights = [pair for bucket in weight_buckets(policy, torch.float32) for pair in bucket]
    misspelled = [(name.replace("lm_head", "lm_haed"), tensor) for name, tensor in weights]
    for wrong, message in (
        (misspelled, r"no weight 'lm_haed\.weight'\. Did you mean 'lm_head\.weight'\?"),
        (weights[1:], r"left out 1 weights .* 'model\.embed_tokens\.weight'"),
        ([], f"left out {len(weights)} weights"),
    ):
        with pytest.raises(RunError, match=message):
            engine.update_weights([wrong], version=2)


def test_stats_count_since_the_last_call(model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("llama"), load_policy(model_folder("llama")))
    completions = engine.generate(requests_of(PROMPTS), SamplingParams(5))
    stats = engine.stats()
    assert stats["num_tokens"] == sum(len(c.token_ids) for c in completions)
    assert stats["tokens_per_s"] > 0
    assert engine.stats() == {"num_tokens": 0.0, "tokens_per_s": 0.0}


def test_close_lets_go_of_the_model(model_folder, start_engine):
    engine = start_engine(model_folder("llama"), None)
    engine.close()
    assert engine._model is None


def test_batch_size_below_one(start_engine):
    with pytest.raises(ConfigError, match=r"rollout\.max_batch_size is 0: give a number from 1 up to"):
        start_engine(None, None, max_batch_size=0)
