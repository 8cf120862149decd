"""Models as they come: each is right or refused before a weight is loaded, and none leaks or is random in silence."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_fixtures import IS_BEFORE_5_13, IS_BEFORE_5_24
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1PreTrainedModel

from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models import packing_checks
from rlplug.models.loading import empty_model, load_model
from rlplug.models.lora.adapters import add_adapters
from rlplug.models.lora.config import LoRAConfig
from rlplug.models.packing_checks import check_loaded, check_passes
from rlplug.models.shape import widths_of
from rlplug.weight_sync.hf_names import adapters_of

SIZES = {
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
EXPERTS = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
WHISPER = {"decoder_attention_heads": 4, "encoder_layers": 1, "encoder_attention_heads": 4, "pad_token_id": 0}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
GROUPS = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LEAKS, OWN, CRASHES = "leaks each packed sequence", "of it alone", "is not causal"


@pytest.fixture
def folder(tmp_path):
    def write(kind, options):
        CONFIG_MAPPING[kind](**options).save_pretrained(tmp_path)
        return ModelConfig(path=str(tmp_path), dtype="float32")

    return write


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("llama", SIZES, None),
        ("gpt_oss", EXPERTS | {"head_dim": 16, "sliding_window": 5}, None),
        ("mixtral", EXPERTS | {"router_jitter_noise": 0.01}, None),
        ("nemotron", SIZES | {"num_key_value_heads": 4}, None if IS_BEFORE_5_13 else LEAKS),
        ("lfm2", SIZES | {"layer_types": ["conv", "full_attention"] * 2}, LEAKS),
        ("doge", SIZES, OWN),
        ("llama4_text", EXPERTS | {"head_dim": 12, "intermediate_size_mlp": 64, "attention_chunk_size": 32}, OWN),
        ("phimoe", EXPERTS | {"sliding_window": 5}, OWN),
        (
            "phimoe",
            EXPERTS | {"router_jitter_noise": 0.01},
            "noise that a run switches off",
        ),  # which evaluation reads too
        ("whisper", {"vocab_size": 32, "d_model": 32, "decoder_layers": 1, **WHISPER}, "does not know logits_to_keep"),
        ("roberta", SIZES, CRASHES),
        ("gptj", SIZES | {"rotary_dim": 4}, None),  # transformers' own attention reads borders in the positions
        ("falcon", SIZES, LEAKS if IS_BEFORE_5_24 else None),
    ],
)
def test_a_model_is_right_or_refused(kind, options, problem, folder):
    """Catches layers that drop the borders of sequences, masks that are dropped, and a first pass that raises."""
    config = folder(kind, options)
    if problem is None:
        check_passes(config, "model.policy")
        return
    with pytest.raises(ConfigError, match=rf"^model\.policy\.path.*{problem}"):
        check_passes(config, "model.policy")


def test_a_refusal_names_the_layer_that_leaks_and_the_remedy(folder):
    """Catches a message that names the model alone, or the layer behind the one that leaks."""
    config = folder("lfm2", SIZES | {"layer_types": ["full_attention", "conv"] * 2})
    with pytest.raises(ConfigError, match=r"Lfm2ForCausalLM leaks .* its layer Lfm2ShortConv\. Set .* HybridTrainer"):
        check_passes(config, "model.policy")


class Ranks:
    """A strategy of one rank on a CPU, as far as the check reads it."""

    sequence_rank, sequence_size, sequence_group, root_device = 0, 1, None, torch.device("cpu")

    def any_rank(self, value):
        return value


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("Triton is too old")


@pytest.mark.parametrize(("kind", "dtype", "leaks"), [("llama", "bfloat16", False), ("lfm2", "float32", True)])
def test_a_loaded_model_is_tried_as_it_runs(kind, dtype, leaks):
    """Catches what is there on the run's device alone, as a kernel's leak or a kernel that fails in its backward pass,

    which a run would meet after its first rollout; round-off that is taken for a leak; and a reference, which nothing
    trains, that is refused for its backward pass.
    """
    torch.manual_seed(0)
    layers = {} if kind == "llama" else {"layer_types": ["conv", "full_attention"] * 2, "initializer_range": 0.25}
    config = CONFIG_MAPPING[kind](**SIZES | layers)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="packed")
    if not leaks:
        check_loaded("model.policy", model, Ranks())
        assert all(parameter.grad is None for parameter in model.parameters())
        model.model.norm.register_forward_hook(lambda layer, given, output: WithoutBackward.apply(output))
        with pytest.raises(ConfigError, match=r"llama .* on cpu has no backward pass, .*: RuntimeError: Triton"):
            check_loaded("model.policy", model, Ranks())
        check_loaded("model.reference", model.requires_grad_(False), Ranks())
        return
    with pytest.raises(ConfigError, match=r"^model\.policy: lfm2 as it runs on cpu changes .* causal-conv1d"):
        check_loaded("model.policy", model, Ranks())


class Noisy(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) + self.training * torch.rand(1)


class Shifted(torch.nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) + 1.0 * self.training


@pytest.mark.parametrize(("layer", "problem"), [(Noisy, "in each training pass"), (Shifted, "than an engine")])
def test_noise_is_found_by_its_effect(layer, problem, folder, monkeypatch):
    """Catches a check that knows names of options: this noise has none."""
    first_layers = packing_checks._first_layers

    def noisy(*arguments):
        model = first_layers(*arguments)
        model.model.layers[0].mlp.up_proj = layer(48, 64, bias=False, device="meta")
        return model

    monkeypatch.setattr(packing_checks, "_first_layers", noisy)
    with pytest.raises(ConfigError, match=problem):
        check_passes(folder("llama", SIZES), "model.policy")


def test_a_large_model_is_tried_on_a_layer_of_each_kind(folder):
    """Catches a check that runs all layers, or too few: the first full attention of Gemma 3 is its sixth layer."""
    layers = SIZES | {"num_hidden_layers": 24, "head_dim": 16, "sliding_window": 5}
    config = CONFIG_MAPPING["gemma3_text"](**layers)
    model = packing_checks._first_layers(config, "somewhere", "model.policy")
    assert len(model.model.layers) == 6


def test_widths_of_layers_that_differ_are_the_largest():
    config = CONFIG_MAPPING["gemma3n_text"](**SIZES | {"intermediate_size": [64, 96, 64, 64]})
    assert widths_of(config).mlp == 96
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 8, "global_head_dim": 16}
    assert widths_of(CONFIG_MAPPING["gemma4_text"](**SIZES | layers)).query == 64  # an option for each layer raises


def test_buffers_that_the_whole_model_computes_are_those_of_transformers(folder):
    """Catches factors left as the memory was: no file holds Falcon-H1's, and its layers do not compute them."""
    config = dataclasses.replace(folder("falcon_h1", SIZES | MAMBA | {"ssm_multipliers": [2.0] * 5}), init="random")
    read = AutoConfig.from_pretrained(config.path)
    expected = dict(AutoModelForCausalLM.from_config(read).named_buffers())
    found = dict(load_model(config).named_buffers())
    assert found.keys() == expected.keys()
    assert any(name.endswith("mup_vector") for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_buffers_that_nothing_computes_are_refused(folder, monkeypatch):
    """Catches a loader that takes whatever is in memory for a buffer's values."""
    config = dataclasses.replace(folder("falcon_h1", SIZES | MAMBA), init="random")
    monkeypatch.setattr(FalconH1PreTrainedModel, "_init_weights", PreTrainedModel._init_weights)
    with pytest.raises(ConfigError, match=r"no file holds model\.layers\.0\.mamba\.mup_vector"):
        load_model(config)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe"])
def test_all_linear_leaves_routers_and_experts_out(kind, folder):
    """Catches peft's own choice of experts: of GLM-4 and DeepSeek, whose shared experts have the names of others."""
    options = GROUPS | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    model = empty_model(folder(kind, options))
    said = add_adapters(model, LoRAConfig(rank=2), torch.float32).description
    assert "routers among them" in said or (IS_BEFORE_5_13 and kind == "glm4_moe")
    assert not [name for name in adapters_of(model).updates if "gate." in name]
    assert not [name for name, _ in model.named_parameters() if ".experts." in name and "lora" in name]


def test_sinks_are_those_of_transformers(folder):
    """Sequences, windows and gradients of sinks, against eager attention of each sequence."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gpt_oss"](**EXPERTS | {"head_dim": 16, "sliding_window": 5})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="packed")
    sinks = model.model.layers[0].self_attn.sinks
    torch.nn.init.normal_(sinks)
    first, second = torch.arange(3, 10), torch.arange(12, 21)
    gradients = {}
    for implementation in ("packed", "eager"):
        model.set_attn_implementation(implementation)
        if implementation == "packed":
            logits = packing_checks._logits(model, first[:0].new_tensor([*first, 4]), second)
        else:
            alone = [model(input_ids=ids[None]).logits[0] for ids in (torch.tensor([*first, 4]), second)]
            logits, packed = torch.cat(alone), logits
            torch.testing.assert_close(packed, logits, rtol=0, atol=1e-4)
        (gradients[implementation],) = torch.autograd.grad(logits.logsumexp(-1).sum(), sinks, retain_graph=True)
    torch.testing.assert_close(gradients["packed"], gradients["eager"], rtol=1e-3, atol=1e-5)
