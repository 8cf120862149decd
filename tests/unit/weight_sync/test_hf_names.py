"""Names and weights of a checkpoint: compared with the files that transformers writes."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoHybridConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from rlplug.errors import ConfigError
from rlplug.weight_sync.buckets import weight_buckets
from rlplug.weight_sync.hf_names import HFWeight, hf_views, hf_weights

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, head_dim=8, mlp_only_layers=[1]),
    "qwen3_moe_tied": Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, head_dim=8, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, **HEADS, num_local_experts=3),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **HEADS, **EXPERTS, shared_expert_intermediate_size=24),
    "llama": LlamaConfig(**SIZES, **HEADS),
}


def make_model(family="qwen3_moe", device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)


def saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_what_a_checkpoint_does(family, max_bytes, dtype, tmp_path):
    model = make_model(family)
    sent = [pair for bucket in weight_buckets(model, dtype, max_bytes) for pair in bucket]
    expected = saved(model, tmp_path)
    assert sorted(name for name, _ in sent) == sorted(expected)
    for name, tensor in sent:
        assert tensor.dtype == dtype
        assert tensor.shape == expected[name].shape, name
        assert torch.equal(tensor, expected[name].to(dtype)), name


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_moe", ["mlp.experts.2.gate_proj", "mlp.experts.2.up_proj", "mlp.experts.2.down_proj", "mlp.gate"]),
        ("mixtral", [f"block_sparse_moe.experts.2.{name}" for name in ("w1", "w2", "w3")]),
        ("qwen2_moe", ["mlp.experts.2.gate_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert_gate"]),
        ("llama", ["mlp.gate_proj", "self_attn.q_proj"]),
    ],
)
def test_names_are_those_that_engines_know(family, names):
    """Whatever a version of transformers writes: these were on the hub before it fused experts."""
    views = hf_views(make_model(family, "meta"))
    assert {f"model.layers.{layer}.{name}.weight" for name in names for layer in (0, 2)} <= views.keys()


@pytest.mark.parametrize("family", CONFIGS)
def test_views_are_of_the_models_memory(family, tmp_path):
    model = make_model(family)
    views = hf_views(model)
    for number, view in enumerate(views.values()):
        view.fill_(number)
    expected = saved(model, tmp_path)
    assert views.keys() == expected.keys()
    assert all(bool((expected[name] == number).all()) for number, name in enumerate(views))


@pytest.mark.parametrize("family", CONFIGS)
def test_model_without_memory_has_the_same_weights(family):
    model = make_model(family)
    assert hf_weights(make_model(family, "meta")) == hf_weights(model)
    assert hf_weights(model).keys() == dict(model.named_parameters()).keys()  # tied ones once


def test_other_modules_keep_their_names():
    for module in (make_model("llama"), nn.Sequential(nn.Linear(2, 3), nn.Conv1d(3, 2, 2))):
        assert hf_weights(module) == {name: (HFWeight(name, p.shape),) for name, p in module.named_parameters()}


def transposed(model, weights):
    return {name: w.mT if "experts" in name else w for name, w in revert_weight_conversion(model, weights).items()}


def interleaved(model, weights):
    """Rows of gate and up by turns: even ones of an expert's are its gate."""
    apart = {n: torch.cat([w[:, ::2], w[:, 1::2]], dim=1) if "gate_up" in n else w for n, w in weights.items()}
    return revert_weight_conversion(model, apart)


def one_short(model, weights):
    return {name: w for name, w in revert_weight_conversion(model, weights).items() if "experts.2.up_proj" not in name}


def under_one_name(model, weights):
    return {name.replace("v_proj", "k_proj"): w for name, w in revert_weight_conversion(model, weights).items()}


@pytest.mark.parametrize(
    ("conversion", "refused"),
    [
        (transposed, r"layers\.0\.mlp\.experts\.gate_up_proj \[3, 32, 32\]"),
        (interleaved, r"layers\.0\.mlp\.experts\.gate_up_proj \[3, 32, 32\]"),
        (one_short, r"layers\.0\.mlp\.experts\.gate_up_proj \[3, 32, 32\]"),
        (under_one_name, r"layers\.0\.self_attn\.v_proj\.weight \[16, 32\]"),
    ],
)
def test_other_conversions_are_refused(conversion, refused, monkeypatch):
    monkeypatch.setattr("rlplug.weight_sync.hf_names.revert_weight_conversion", conversion)
    with pytest.raises(ConfigError, match=rf"transformers makes model.{refused} of \w+ForCausalLM in a way"):
        hf_weights(make_model(device="meta"))


def test_a_single_expert(tmp_path):
    config = Qwen3MoeConfig(**SIZES, **HEADS, **(EXPERTS | {"num_experts": 1, "num_experts_per_tok": 1}), head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    expected = {name: tensor.shape for name, tensor in saved(model, tmp_path).items()}
    assert {name: view.shape for name, view in hf_views(model).items()} == expected


def test_a_weight_that_is_neither_experts_nor_a_matrix_is_cut_too():
    """Of a linear attention: convolutions of queries, keys and values in one tensor [C, 1, K]."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(OlmoHybridConfig(num_hidden_layers=4))
    names = [name for name, _ in model.named_parameters() if name.endswith("0.linear_attn.conv1d.weight")]
    if not names and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this transformers (5.8.1 at least) keeps the convolutions in tensors of their own")
    (name,) = names
    shapes = {weight.name: weight.shape for weight in hf_weights(model)[name]}
    assert shapes == {n: t.shape for n, t in revert_weight_conversion(model, {name: model.get_parameter(name)}).items()}
    assert len(shapes) == 3


def test_rows_that_are_moved_within_a_weight_are_noticed(monkeypatch):
    def moved(model, weights):
        return {n: w.flip(0) if "q_proj" in n else w for n, w in revert_weight_conversion(model, weights).items()}

    monkeypatch.setattr("rlplug.weight_sync.hf_names.revert_weight_conversion", moved)
    with pytest.raises(ConfigError, match=r"q_proj\.weight"):
        hf_weights(make_model())
