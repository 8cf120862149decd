"""Loading the policy: what is refused, and how a model starts."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, OPTConfig, Qwen2_5_VLConfig

from rlplug.errors import ConfigError
from rlplug.models.config import ModelConfig, load_spec, load_tokenizer, require_same_tokens
from rlplug.models.loading import load_model
from rlplug.models.packing_checks import check_passes


def config_of(folder, **options):
    return ModelConfig(path=str(folder), dtype="float32", **options)


def problem_of(folder, **options):
    with pytest.raises(ConfigError) as caught:
        load_model(config_of(folder, **options))
    message = str(caught.value)
    assert message.startswith("model.policy.path")
    return message


def test_missing_folder(tmp_path):
    for load in (load_model, load_tokenizer, lambda config: load_spec(config, None)):
        with pytest.raises(ConfigError, match=r"model\.policy\.path: the folder '.*/nowhere' does not exist"):
            load(config_of(tmp_path / "nowhere"))


def test_a_model_beside_the_policy_must_read_its_tokens(model_folder, copied_folder):
    tokenizer = load_tokenizer(config_of(model_folder("llama")))
    require_same_tokens(config_of(model_folder("llama_tied")), "model.reference", tokenizer)
    folder = copied_folder("llama")
    words = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"^model\.critic\.trunk\.path '.*' has another tokenizer than model\.policy"):
        require_same_tokens(config_of(folder), "model.critic.trunk", tokenizer)


def test_a_vision_language_model_is_refused_by_name(copied_folder):
    folder = copied_folder("llama")
    Qwen2_5_VLConfig().save_pretrained(folder)
    assert "is a vision-language model, Qwen2_5_VLConfig: rlplug trains on text alone" in problem_of(folder)


def test_folder_without_weights(copied_folder):
    folder = copied_folder("llama")
    (folder / "model.safetensors").unlink()
    assert "the folder gives no weights: " in problem_of(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")  # a pickle is not an alternative
    assert "the folder gives no weights: " in problem_of(folder)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1", None], ids=["empty", "lfs", "cut"]
)
def test_weights_that_are_no_safetensors(content, copied_folder):
    file = copied_folder("llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20_000] if content is None else content)
    assert "the folder gives no weights: " in problem_of(file.parent)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_leave_something_out(name, copied_folder):
    file = copied_folder("llama") / "model.safetensors"
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    assert f"has no value for 1 weights, first {name!r}" in problem_of(file.parent)


def test_weights_of_another_shape(copied_folder):
    assert "gives no weights" in problem_of(copied_folder("llama", vocab_size=40))


def test_configurations_that_transformers_refuses(copied_folder):
    folder = copied_folder("llama", model_type="lama")
    assert "gives no configuration: " in problem_of(folder)
    (folder / "config.json").write_text("{")
    assert "gives no configuration: " in problem_of(folder)
    (folder / "config.json").unlink()
    assert "gives no configuration: " in problem_of(folder)


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_attention_that_is_not_installed(init, model_folder):
    """Its key is at fault, not the model's folder."""
    with pytest.raises(ConfigError, match=r"^model\.policy\.attn_implementation: FlashAttention2 .*not"):
        load_model(config_of(model_folder("llama"), attn_implementation="flash_attention_2", init=init))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_attention_that_may_mix_sequences_is_refused(implementation, model_folder):
    with pytest.raises(ConfigError, match=rf"model\.policy\.attn_implementation is '{implementation}'.*one of packed,"):
        load_model(config_of(model_folder("llama"), attn_implementation=implementation))


def test_folder_without_tokenizer(copied_folder):
    folder = copied_folder("llama")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="the folder gives no tokenizer: "):
        load_tokenizer(config_of(folder))


def test_tokenizer_larger_than_the_vocabulary(copied_folder):
    config = config_of(copied_folder("llama", vocab_size=12))
    with pytest.raises(ConfigError, match="tokenizer has ids up to 12, and the model embeds only 12"):
        load_spec(config, load_tokenizer(config))
    assert max(load_tokenizer(config).get_vocab().values()) == 12


def test_no_end_token(copied_folder):
    folder = copied_folder("llama", eos_token_id=None)
    for name in ("tokenizer_config.json", "generation_config.json"):
        written = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in written.items() if not k.startswith("eos")}))
    config = config_of(folder)
    with pytest.raises(ConfigError, match="names an end token, so no completion could stop"):
        load_spec(config, load_tokenizer(config))


def test_spec_gathers_end_tokens_from_everywhere(copied_folder):
    folder = copied_folder("llama", eos_token_id=[5, 3])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    config = ModelConfig(path=str(folder))
    spec = load_spec(config, load_tokenizer(config))
    assert spec.eos_token_ids == (1, 3, 5, 9)  # 1 is the tokenizer's
    assert (spec.pad_token_id, spec.max_context, spec.dtype) == (0, 32, torch.bfloat16)


def test_tokenizer_without_padding_pads_with_the_end_token(copied_folder):
    folder = copied_folder("llama")
    written = json.loads((folder / "tokenizer_config.json").read_text())
    del written["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    config = config_of(folder)
    assert load_tokenizer(config).pad_token_id == 1
    assert load_spec(config, load_tokenizer(config)).pad_token_id == 1


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "gpt2"])
def test_loads_what_the_folder_holds(family, model_folder):
    policy = load_model(ModelConfig(path=str(model_folder(family))))
    expected = AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32).state_dict()
    assert policy.training
    assert policy.state_dict().keys() == expected.keys()
    for name, tensor in policy.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name])


def test_random_weights_are_seeded_and_leave_the_global_generator(model_folder):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    models = [load_model(config_of(model_folder("llama"), init="random", seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    first, again, other = [model.state_dict() for model in models]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert 0.2 < first["lm_head.weight"].std() < 0.3  # the configuration's initializer_range is 0.25


def test_random_weights_are_those_of_the_seed_wherever_the_generator_stands(model_folder):
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        weights.append(load_model(config_of(model_folder("llama"), init="random")).state_dict()["lm_head.weight"])
    assert torch.equal(*weights)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_dropout_is_off_in_training(family, copied_folder, tmp_path):
    if family == "gpt2":
        folder = copied_folder("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    else:
        folder = tmp_path
        sizes = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "vocab_size": 32, "num_hidden_layers": 4}
        OPTConfig(**sizes, num_attention_heads=2, dropout=0.5, attention_dropout=0.5, layerdrop=0.5).save_pretrained(
            folder
        )
    policy, tokens = load_model(config_of(folder, init="random")), torch.tensor([[3, 4, 5, 6]])
    expected = policy.eval()(tokens).logits
    policy.train()
    for _ in range(5):
        assert torch.equal(policy(tokens).logits, expected)


@pytest.mark.parametrize("model_type", ["mamba", "qwen3_next", "bloom", "xglm"])
def test_models_whose_sequences_would_mix_are_refused(model_type, tmp_path):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    reasons = "leaks each packed sequence|over a packed row raised|knows no attention 'packed'"
    with pytest.raises(ConfigError, match=rf"^model\.policy\.path.* ({reasons})"):
        check_passes(config_of(tmp_path), "model.policy")
