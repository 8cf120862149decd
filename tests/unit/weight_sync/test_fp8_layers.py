"""Selection of the weights that are sent in FP8."""

from __future__ import annotations

import pytest
import torch
from rlplug_engines.fp8_engine_checks import check_fp8_fits
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen2MoeConfig

from rlplug.errors import ConfigError
from rlplug.interfaces import FP8Weights, PolicySpec
from rlplug.weight_sync.config import WeightSyncConfig
from rlplug.weight_sync.fp8_layers import choose_fp8_weights, describe

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LAYERS = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def llama(**sizes):
    return on_meta(LlamaConfig(**(LAYERS | SIZES | sizes)))


def qwen2_moe(**sizes):
    return on_meta(Qwen2MoeConfig(**(LAYERS | SIZES | EXPERTS | sizes)))


def mixtral(**sizes):
    return on_meta(MixtralConfig(**(LAYERS | SIZES | {"num_local_experts": 4} | sizes)))


def options(**values):
    return WeightSyncConfig(dtype="fp8_block", **values)


def test_linear_layers_of_the_blocks_and_no_others():
    model = llama()
    fp8 = choose_fp8_weights(model, options())
    assert len(fp8.quantized) == 3 * 7
    assert all(name in dict(model.named_parameters()) for name in fp8.quantized)
    assert fp8.kept == ("lm_head.weight",)
    assert not any("norm" in name or "embed" in name for name in fp8.quantized)
    assert describe(fp8) == ("weight sync in FP8: 21 of 22 linear layers, with power-of-two scales; 1 kept: lm_head")


def test_names_decide_nothing():
    """A linear layer of a block is one whatever it is called, and an output layer too."""
    model = llama()
    block = model.model.layers[0]
    block.mlp.embed_norm_gate = block.mlp.up_proj
    del block.mlp.up_proj
    fp8 = choose_fp8_weights(model, options())
    assert "model.layers.0.mlp.embed_norm_gate.weight" in fp8.quantized


def test_first_and_last_blocks_are_kept():
    fp8 = choose_fp8_weights(llama(), options(keep_first_layers=1, keep_last_layers=1))
    assert {name.split(".")[2] for name in fp8.quantized} == {"1"}
    assert len(fp8.kept) == 2 * 7 + 1
    assert "model.layers.*.mlp.up_proj (2)" in describe(fp8)


def test_patterns_keep_layers():
    fp8 = choose_fp8_weights(llama(), options(keep=["*.self_attn.*", "*.2.mlp.down_proj"]))
    assert len(fp8.quantized) == 3 * 3 - 1
    assert "model.layers.2.mlp.down_proj.weight" in fp8.kept
    config = fp8.quantization_config()
    assert "model.layers.0.self_attn.q_proj" in config["modules_to_not_convert"]
    assert config["weight_block_size"] == [128, 128]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": ["*.attention.*"]}, r"keep has '\*\.attention\.\*', which matches no linear layer.*q_proj"),
        ({"keep": ["*"]}, "keeps all 22 linear layers"),
        ({"keep_first_layers": 2, "keep_last_layers": 1}, "keeps all 22 linear layers"),
    ],
)
def test_options_that_leave_nothing_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        choose_fp8_weights(llama(), options(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": ["lm_head"]}, "its dtype is null"),
        ({"power_of_two_scales": False}, "its dtype is null"),
        ({"dtype": "fp8_block", "keep_first_layers": -1}, "keep_first_layers is -1"),
    ],
)
def test_options_that_mean_nothing_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        WeightSyncConfig(**values)


def test_output_layer_is_kept_also_when_it_is_tied():
    fp8 = choose_fp8_weights(llama(tie_word_embeddings=True), options())
    assert len(fp8.quantized) == 3 * 7
    assert fp8.kept == ("lm_head.weight",)


def test_layers_of_experts_and_not_what_chooses_them():
    fp8 = choose_fp8_weights(qwen2_moe(), options())
    mlps = [f"model.layers.{layer}.mlp" for layer in range(3)]
    owners = [f"{mlp}.{owner}" for mlp in mlps for owner in ("shared_expert", *(f"experts.{n}" for n in range(4)))]
    layers = {f"{owner}.{layer}_proj.weight" for owner in owners for layer in ("gate", "up", "down")}
    assert {name for name in fp8.quantized if ".mlp." in name} == layers
    assert len(fp8.quantized) == len(layers) + 3 * 4
    kept = [f"{mlp}.{layer}" for mlp in mlps for layer in ("gate", "shared_expert_gate")]
    assert sorted(fp8.quantization_config()["modules_to_not_convert"]) == ["lm_head", *kept]


def test_patterns_are_of_the_names_in_a_checkpoint():
    fp8 = choose_fp8_weights(mixtral(), options(keep=["*.1.block_sparse_moe.experts.*", "*.experts.3.w2"]))
    experts = [f"model.layers.1.block_sparse_moe.experts.{n}.w{layer}.weight" for n in range(4) for layer in (1, 2, 3)]
    others = [f"model.layers.{layer}.block_sparse_moe.experts.3.w2.weight" for layer in (0, 2)]
    routers = [f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in range(3)]
    assert set(fp8.kept) == {"lm_head.weight", *experts, *others, *routers}
    with pytest.raises(ConfigError, match=r"'\*\.down_proj', which matches no linear layer"):
        choose_fp8_weights(mixtral(), options(keep=["*.down_proj"]))


def test_experts_in_one_tensor_are_refused_by_name():
    model = on_meta(GptOssConfig(**(LAYERS | SIZES), num_local_experts=4))
    with pytest.raises(ConfigError, match=r"cannot take model\.layers\.0\.mlp\.experts\.gate_up_proj \[4, 256, 768\]"):
        choose_fp8_weights(model, options())


@pytest.fixture
def fits(tmp_path):
    """Raise where a model does not fit: checked by its folder, as engines do it."""

    def check(model, fp8, tensor_parallel_size=1):
        model.config.save_pretrained(tmp_path)
        policy = PolicySpec(str(tmp_path), torch.bfloat16, (1,), 0, 512, fp8)
        check_fp8_fits("AnEngine", policy, tensor_parallel_size)

    return check


def test_whole_blocks_fit(fits):
    fp8 = choose_fp8_weights(llama(), options())
    assert len(fp8.quantized) == 3 * 7
    fits(llama(), fp8)


@pytest.mark.parametrize(
    ("sizes", "size", "message"),
    [
        (
            {"num_key_value_heads": 1},
            1,
            r"k_proj\.weight \[64, 256\] in FP8: .* with q_proj and v_proj, and 64 rows are no whole",
        ),
        ({}, 2, r"k_proj\.weight \[128, 256\] in FP8: .* 128 rows are no whole blocks of 128 over 2 GPUs"),
    ],
)
def test_blocks_that_straddle_fused_layers_are_refused(sizes, size, message, fits):
    model = llama(**sizes)
    with pytest.raises(ConfigError, match=message) as refusal:
        fits(model, choose_fp8_weights(model, options()), size)
    assert 'model.weight_sync.keep takes patterns of their names, such as "*.self_attn.*"' in str(refusal.value)


def test_a_part_of_a_fused_layer_cannot_be_kept(fits):
    model = llama()
    with pytest.raises(
        ConfigError, match=r"up_proj.* it is one matrix with gate_proj, of which not all are sent in FP8"
    ):
        fits(model, choose_fp8_weights(model, options(keep=["*.gate_proj"])))


def test_columns_that_are_distributed_must_be_whole_blocks(fits):
    model = llama()
    with pytest.raises(ConfigError, match=r"down_proj\.weight \[256, 384\] in FP8: 384 columns are no whole blocks"):
        fits(model, choose_fp8_weights(model, options(keep=["*.[qkv]_proj", "*.gate_proj", "*.up_proj"])), 2)


def test_columns_must_be_whole_blocks(fits):
    model = llama(hidden_size=192)
    with pytest.raises(ConfigError, match=r"q_proj\.weight \[256, 192\] in FP8: 192 columns are no whole"):
        fits(model, choose_fp8_weights(model, options()))


@pytest.mark.parametrize("make_model", [qwen2_moe, mixtral])
def test_experts_of_whole_blocks_fit(make_model, fits):
    model = make_model()
    for keep, blocks in ([], {"0", "1", "2"}), (["*.1.*.experts.*"], {"0", "2"}):
        fp8 = choose_fp8_weights(model, options(keep=keep))
        assert {name.split(".")[2] for name in fp8.quantized if ".experts." in name} == blocks
        fits(model, fp8)


@pytest.mark.parametrize("keep", ["*.1.mlp.experts.2.*", "*.1.mlp.experts.*.down_proj"])
def test_a_part_of_the_experts_of_a_block_cannot_be_kept(keep, fits):
    model = qwen2_moe()
    message = r"layers\.1\.mlp\.experts\.0\.gate_proj.* all experts of a block are one layer, and not all of them"
    with pytest.raises(ConfigError, match=message) as refusal:
        fits(model, choose_fp8_weights(model, options(keep=[keep])))
    assert 'such as "*.experts.*"' in str(refusal.value)


@pytest.mark.parametrize(
    ("make_model", "sizes", "size", "message"),
    [
        (qwen2_moe, {"moe_intermediate_size": 192}, 1, r"0\.gate_proj\.weight \[192, 256\] .* up_proj, and 192 rows"),
        (mixtral, {"intermediate_size": 64}, 1, r"0\.w1\.weight \[64, 256\] .* with w3, and 64 rows"),
        (qwen2_moe, {}, 2, r"0\.gate_proj\.weight \[128, 256\] .* 128 rows are no whole blocks of 128 over 2 GPUs"),
    ],
)
def test_experts_of_no_whole_blocks_are_refused(make_model, sizes, size, message, fits):
    model = make_model(**sizes)
    with pytest.raises(ConfigError, match=rf"layers\.0\..*\.experts\.{message}"):
        fits(model, choose_fp8_weights(model, options(keep=["*.self_attn.*"])), size)


def test_what_is_kept_need_not_fit(fits):
    model = llama(num_key_value_heads=1)
    fits(model, choose_fp8_weights(model, options(keep=["*.[qkv]_proj"])))
    assert FP8Weights.scale_shape(torch.Size([64, 256])) == (1, 2)
