"""The engine of the core: its logprobs are the trainer's, and its tokens depend on the request's seed alone."""

from __future__ import annotations

import json
import math

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlplug.errors import ConfigError, RunError
from rlplug.forward import policy_forward
from rlplug.rollout.buckets import weight_buckets
from rlplug.rollout.requests import make_requests, to_samples
from rlplug.types import Batch, Prompt, Request, SamplingParams

FAMILIES = ["llama", "llama_tied", "qwen2", "gpt2"]
PROMPTS = [(3, 4), (5,), (6, 7, 8, 9, 10, 11, 12), (0, 2, 0), (31, 30, 29, 28)]
"""Of several lengths; one holds the padding token, which there is a token like any other."""
END = 1


class TextlessTokenizer:
    def batch_decode(self, rows, skip_special_tokens):
        return ["" for _ in rows]


def requests_of(prompts, num_samples=1, key="run"):
    tasks = [Prompt(uid=str(i), token_ids=prompt, text="") for i, prompt in enumerate(prompts)]
    return make_requests(tasks, range(len(tasks)), num_samples, key)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def logits_after(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].double().numpy()


def softmax(logits):
    weights = numpy.exp(logits - logits.max())
    return weights / weights.sum()


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
    tasks = [Prompt(uid=str(i), token_ids=prompt, text="") for i, prompt in enumerate(PROMPTS)]
    samples = to_samples(tasks, range(len(tasks)), engine.generate(requests, sampling), TextlessTokenizer())
    batch = Batch.from_samples(samples, pad_token_id=0)
    trainer = policy_forward(policy.train(), batch.pack(), sampling, "none").sampled_logprobs
    assert batch.response_mask.sum() > 100
    assert trainer[batch.response_mask].std() > 0.1  # not all the same
    torch.testing.assert_close(trainer, batch.rollout_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_tokens_do_not_depend_on_the_rest_of_the_batch(family, temperature, model_folder, load_policy, start_engine):
    engine = start_engine(model_folder(family), load_policy(model_folder(family)))
    sampling, requests = SamplingParams(10, temperature), requests_of(PROMPTS, num_samples=3)
    together = engine.generate(requests, sampling)
    alone = [engine.generate([request], sampling)[0] for request in requests]
    assert tokens_of(together) == tokens_of(alone)
    assert tokens_of(engine.generate(requests[::-1], sampling)) == tokens_of(together)[::-1]
    for ours, other in zip(together, alone, strict=True):
        assert ours.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert ours.request_id == other.request_id
        assert ours.finish_reason == other.finish_reason


@pytest.mark.parametrize("max_batch_size", [1, 2, 7, 15])
def test_batch_size_changes_nothing(max_batch_size, model_folder, load_policy, start_engine):
    policy, requests = load_policy(model_folder("llama")), requests_of(PROMPTS, num_samples=3)
    whole = start_engine(model_folder("llama"), policy).generate(requests, SamplingParams(10))
    split = start_engine(model_folder("llama"), policy, max_batch_size=max_batch_size)
    assert tokens_of(split.generate(requests, SamplingParams(10))) == tokens_of(whole)


def test_seeds(model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("llama"), load_policy(model_folder("llama")))
    requests = [Request(str(seed), (3, 4), seed) for seed in (5, 5, 6, 7, 2**62)]
    torch.manual_seed(0)
    first = tokens_of(engine.generate(requests, SamplingParams(12)))
    torch.manual_seed(1)
    assert tokens_of(engine.generate(requests, SamplingParams(12))) == first
    assert first[0] == first[1]
    assert len(set(first)) == 4
    shorter = tokens_of(engine.generate(requests, SamplingParams(4)))
    assert shorter == [tokens[:4] for tokens in first]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(family, model_folder, load_policy, start_engine):
    policy = load_policy(model_folder(family)).eval()
    engine = start_engine(model_folder(family), policy)
    ours = engine.generate(requests_of(PROMPTS), SamplingParams(12, temperature=0))
    policy.set_attn_implementation("sdpa")
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert completion.token_ids == tuple(theirs[0, len(prompt) :].tolist())


def test_how_completions_end(model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("llama"), load_policy(model_folder("llama")))
    completions = engine.generate(requests_of(PROMPTS, num_samples=40), SamplingParams(9))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    cut = [c for c in completions if c.finish_reason == "length"]
    assert len(stopped) > 10
    assert len(cut) > 10
    assert len(stopped) + len(cut) == 200
    assert all(c.token_ids[-1] == END and END not in c.token_ids[:-1] for c in stopped)
    assert all(END not in c.token_ids and len(c.token_ids) == 9 for c in cut)
    assert len({len(c.token_ids) for c in stopped}) > 3
    for completion in completions:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.policy_version == 1


def test_every_end_token_ends(copied_folder, load_policy, start_engine):
    folder = copied_folder("llama", eos_token_id=[1, 7, 20])
    completions = start_engine(folder, load_policy(folder)).generate(
        requests_of(PROMPTS, num_samples=20), SamplingParams(9)
    )
    lasts = {c.token_ids[-1] for c in completions if c.finish_reason == "stop"}
    assert lasts == {1, 7, 20}
    assert all(not {1, 7, 20} & set(c.token_ids[:-1]) for c in completions)


def test_prompt_that_fills_the_context(model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("llama"), load_policy(model_folder("llama")))
    (last,) = engine.generate(requests_of([(5,) * 31]), SamplingParams(10))
    assert len(last.token_ids) == 1
    for length in (32, 40):
        with pytest.raises(RunError, match=rf"run/1/0: its prompt has {length} tokens, .* ends at 32\. Shorten it"):
            engine.generate(requests_of([(5,), (5,) * length]), SamplingParams(10))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_request_at_the_end_of_the_context_cuts_no_other_short(family, model_folder, load_policy, start_engine):
    engine = start_engine(model_folder(family), load_policy(model_folder(family)))
    requests = requests_of([(5,) * 30, (3, 4), (6,) * 25, (8,) * 22], num_samples=4)
    together = engine.generate(requests, SamplingParams(10))
    assert tokens_of(together) == [engine.generate([r], SamplingParams(10))[0].token_ids for r in requests]
    longest = [max(len(c.token_ids) for c in together[i : i + 4]) for i in range(0, 16, 4)]
    assert longest == [2, 10, 7, 10]
    assert [c.request_id for c in together] == [r.request_id for r in requests]


def test_no_requests(model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("llama"), load_policy(model_folder("llama")))
    assert engine.generate([], SamplingParams()) == []


def test_generate_before_the_first_sync(model_folder, start_engine):
    engine = start_engine(model_folder("llama"), None)
    with pytest.raises(RunError, match="no complete set of weights"):
        engine.generate(requests_of(PROMPTS), SamplingParams(2))


def test_incomplete_sync_stops_generation(model_folder, load_policy, start_engine):
    policy = load_policy(model_folder("llama"))
    engine = start_engine(model_folder("llama"), policy)
    weights = [pair for bucket in weight_buckets(policy, torch.float32) for pair in bucket]
    misspelled = [(name.replace("lm_head", "lm_haed"), tensor) for name, tensor in weights]
    for wrong, message in (
        (misspelled, r"no weight 'lm_haed\.weight'\. Did you mean 'lm_head\.weight'\?"),
        (weights[1:], r"left out 1 weights .* 'model\.embed_tokens\.weight'"),
        ([], f"left out {len(weights)} weights"),
    ):
        with pytest.raises(RunError, match=message):
            engine.update_weights([wrong], version=2)
        with pytest.raises(RunError, match="no complete set of weights"):
            engine.generate(requests_of(PROMPTS), SamplingParams(2))
    report = engine.update_weights([weights], version=3)
    assert (report.policy_version, report.num_tensors, report.num_buckets) == (3, len(weights), 1)
    assert report.num_bytes == sum(4 * parameter.numel() for parameter in policy.parameters())
    assert engine.generate(requests_of(PROMPTS), SamplingParams(2))[0].policy_version == 3


def test_new_weights_are_used(model_folder, load_policy, start_engine):
    policy = load_policy(model_folder("llama"))
    engine = start_engine(model_folder("llama"), policy)
    with torch.no_grad():
        policy.lm_head.weight.mul_(0.5)
    before = engine.generate(requests_of(PROMPTS, 4), SamplingParams(10))
    engine.update_weights(weight_buckets(policy, torch.float32), version=2)
    after = engine.generate(requests_of(PROMPTS, 4), SamplingParams(10))
    assert tokens_of(before) != tokens_of(after)
    probabilities = softmax(logits_after(policy, PROMPTS[0]))
    assert after[0].logprobs[0] == pytest.approx(math.log(probabilities[after[0].token_ids[0]]), abs=1e-5)


def test_generation_config_of_the_model_has_no_influence(copied_folder, model_folder, load_policy, start_engine):
    folder = copied_folder("llama")
    hostile = {
        "do_sample": True,
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.1,
        "repetition_penalty": 5.0,
        "max_new_tokens": 1,
        "min_new_tokens": 9,
        "suppress_tokens": [3, 4, 5, 6],
        "num_beams": 2,
    }
    (folder / "generation_config.json").write_text(json.dumps(hostile))
    policy, requests = load_policy(model_folder("llama")), requests_of(PROMPTS, num_samples=8)
    plain = start_engine(model_folder("llama"), policy).generate(requests, SamplingParams(8))
    completions = start_engine(folder, policy).generate(requests, SamplingParams(8))
    assert tokens_of(completions) == tokens_of(plain)
    assert [c.logprobs for c in completions] == [c.logprobs for c in plain]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.generation_config.temperature == 0.01  # the file is one that transformers heeds


def test_start_and_generate_leave_the_global_generator(model_folder, load_policy, start_engine):
    policy = load_policy(model_folder("llama"))
    before = torch.get_rng_state()
    engine = start_engine(model_folder("llama"), policy)
    engine.generate(requests_of(PROMPTS), SamplingParams(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_stats_count_since_the_last_call(model_folder, load_policy, start_engine):
    engine = start_engine(model_folder("llama"), load_policy(model_folder("llama")))
    completions = engine.generate(requests_of(PROMPTS), SamplingParams(5))
    stats = engine.stats()
    assert stats["num_tokens"] == sum(len(c.token_ids) for c in completions)
    assert stats["tokens_per_s"] > 0
    assert engine.stats() == {"num_tokens": 0.0, "tokens_per_s": 0.0}


def test_closes_twice(model_folder, start_engine):
    engine = start_engine(model_folder("llama"), None)
    engine.close()
    engine.close()
    assert engine._model is None


def test_batch_size_below_one(start_engine):
    with pytest.raises(ConfigError, match=r"rollout\.max_batch_size is 0: give at least 1"):
        start_engine(None, None, max_batch_size=0)
