"""Tensor parallelism on 2 and 4 real processes against the whole model; gradients of a Qwen 3 are in test_mesh.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
)

from rlplug.distributed.tensor_parallel import parallelize
from rlplug.errors import ConfigError

FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "gemma3", "mistral", "phi3"]
TOKENS = torch.randint(2, 32, (2, 1, 2, 9), generator=torch.Generator().manual_seed(3))
SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def folder_of(model_folder, tmp_path_factory):
    phi3 = tmp_path_factory.mktemp("phi3")  # gathers what it splits: queries, keys and values are one matrix
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = Phi3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)
        AutoModelForCausalLM.from_config(config).save_pretrained(phi3)
    return lambda family: phi3 if family == "phi3" else model_folder(family)


@pytest.fixture(scope="module")
def results(run_jobs, folder_of):
    done = {}

    def of(world_size):
        if world_size not in done:
            common = {"kind": "update", "axes": {"tensor": 2}, "max_norm": 1.0}
            tokens = TOKENS[: world_size // 2].tolist()
            jobs = {name: {"folder": str(folder_of(name)), "tokens": tokens} | common for name in FAMILIES}
            done[world_size] = run_jobs(world_size, jobs)
        return done[world_size]

    return of


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole_model(family, world_size, results, folder_of):
    found = results(world_size)[family]["gradients"]
    model = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32, attn_implementation="eager")
    rows = TOKENS[: world_size // 2].flatten(0, 2)
    losses = cross_entropy(model(input_ids=rows).logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    (-losses * (1 + torch.arange(16).view(2, 8) % 5).repeat(world_size // 2, 1)).sum().backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        assert scale > 0
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=2e-5 * scale, msg=name)


def refused(config, size):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError) as caught:
        parallelize(model, SimpleNamespace(size=lambda: size))
    message = str(caught.value)
    assert message.startswith(f"trainer.strategy.init_args.tensor is {size}")
    return message


def test_a_model_without_a_plan_is_refused():
    config = GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4)
    assert "no tensor-parallel plan for GPT2Model" in refused(config, 2)


def test_a_plan_with_an_unknown_style_is_refused():
    config = MixtralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    assert "MixtralModel splits layers.*.mlp.experts" in refused(config, 2)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "size", "named"),
    [(4, 2, 4, "num_key_value_heads, 2"), (4, 4, 8, "num_attention_heads, 4"), (16, 16, 32, "num_attention_heads, 16")],
)
def test_sizes_that_do_not_divide_are_refused(heads, key_value_heads, size, named):
    config = LlamaConfig(**SMALL, num_attention_heads=heads, num_key_value_heads=key_value_heads)
    assert f"does not divide {named} in LlamaModel" in refused(config, size)


def test_inner_states_that_do_not_divide_are_refused():
    config = LlamaConfig(**SMALL | {"intermediate_size": 47}, num_attention_heads=4, num_key_value_heads=2)
    assert "intermediate_size, 47" in refused(config, 2)
