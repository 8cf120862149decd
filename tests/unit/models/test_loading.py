"""Weights into shards, on 1, 2 and 4 real processes, against what transformers loads.

Four processes load every night alone: on a push, those of test_mesh.py do, and update what they loaded.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from critics import load_critic
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from rlplug.errors import ConfigError
from rlplug.models import loading
from rlplug.models.config import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.models.loading import empty_model, load_model, load_weights, to_empty_on

STREAMED = "weights streamed from 1 safetensors file"
UNEVEN = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 50, "num_attention_heads": 6, "head_dim": 6}
MESHES = [(1, {}), (2, {}), (2, {"tensor": 2}), (4, {}), (4, {"replicate": 2}), (4, {"tensor": 2})]
CASES = [pytest.param(*mesh, marks=pytest.mark.nightly if mesh[0] == 4 else ()) for mesh in MESHES]
meshes = pytest.mark.parametrize(("world_size", "axes"), CASES, ids=str)


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory):
    """Save a small random model in a new folder."""

    def make(config, dtype=torch.float32, **options):
        folder = tmp_path_factory.mktemp("model")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, **options)
        return folder

    return make


@pytest.fixture(scope="module")
def uneven_folder(make_folder):
    """No dimension divides by four, some parts are shorter, and the last part of the vocabulary is the shortest."""
    return make_folder(LlamaConfig(**UNEVEN, num_hidden_layers=3, num_key_value_heads=2), max_shard_size="20KB")


@pytest.fixture(scope="module")
def loaded(run_jobs, model_folder, uneven_folder):
    """Return what ``load`` of mesh_worker.py gave, by model and axes."""
    done = {}

    def of(world_size, axes, name):
        if world_size not in done:
            jobs = {}
            for size, these in MESHES:
                if size == world_size:
                    jobs |= {
                        f"{these} gemma": load_job(model_folder("gemma"), these),
                        f"{these} random": load_job(model_folder("llama"), these, init="random", seed=5),
                        f"{these} uneven": load_job(uneven_folder, these),
                    }
            done[world_size] = run_jobs(world_size, jobs)
        return done[world_size][f"{axes} {name}"]

    return of


def load_job(folder, axes, **policy):
    return {"kind": "load", "axes": axes, "policy": {"path": str(folder), "dtype": "float32"} | policy}


def reference_tensors(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# ---- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", ["llama", "llama_tied", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral", "gpt2"]
)
def test_every_parameter_and_buffer_is_that_of_from_pretrained(family, model_folder):
    model = load_model(ModelConfig(path=str(model_folder(family))))
    assert_same(dict(model.named_parameters()) | dict(model.named_buffers()), reference_tensors(model_folder(family)))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2},
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rope(rope, make_folder):
    parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 64} | rope
    config = LlamaConfig(**UNEVEN, num_hidden_layers=1, num_key_value_heads=2, rope_parameters=parameters)
    folder = make_folder(config)
    model = load_model(ModelConfig(path=str(folder)))
    assert_same(dict(model.named_parameters()) | dict(model.named_buffers()), reference_tensors(folder))
    plain = LlamaConfig(**UNEVEN, num_hidden_layers=1, num_key_value_heads=2)
    frequencies = dict(AutoModelForCausalLM.from_config(plain).named_buffers())["model.rotary_emb.inv_freq"]
    assert not torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), frequencies)


def test_half_precision_files_become_float32(make_folder):
    config = LlamaConfig(**UNEVEN, num_hidden_layers=1, num_key_value_heads=2)
    folder = make_folder(config, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    model = load_model(ModelConfig(path=str(folder)))
    assert_same(dict(model.named_parameters()) | dict(model.named_buffers()), reference_tensors(folder))


def effect_of(folder):
    config = ModelConfig(path=str(folder))
    model = empty_model(config)
    to_empty_on(model, torch.device("cpu"))
    model.tie_weights()
    effect = load_weights(model, config).description
    assert_same(dict(model.named_parameters()) | dict(model.named_buffers()), reference_tensors(folder))
    return effect


def test_files_of_an_index_are_streamed(uneven_folder):
    assert len(list(uneven_folder.glob("*.safetensors"))) > 3
    assert effect_of(uneven_folder).startswith("weights streamed from ")


def test_weights_that_the_model_lacks_are_told(make_folder):
    """Alone catches a model of fewer layers than its files, by a wrong ``config.json``, that is trained in silence."""
    folder = make_folder(LlamaConfig(**UNEVEN, num_hidden_layers=2, num_key_value_heads=2))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))

    assert effect_of(folder).startswith(f"{STREAMED}; 9 in them are none of the model, first model.layers.1.")


def test_checkpoints_that_transformers_converts_are_loaded_whole(make_folder):
    """Mixtral's experts are one matrix in the model and many in the file."""
    config = MixtralConfig(**UNEVEN, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=3)
    folder = make_folder(config)
    assert any("experts.2.w1.weight" in name for name in load_file(folder / "model.safetensors"))
    assert "transformers converts" in effect_of(folder)


def test_models_that_transformers_converts_are_never_streamed(make_folder):
    """Names alone do not tell: some conversions transpose and keep the name."""
    config = MixtralConfig(**UNEVEN, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=3)
    folder = make_folder(config)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    assert "transformers converts" in effect_of(folder)


def test_a_checkpoint_of_the_model_without_its_head_is_loaded_whole(copied_folder):
    """As GPT-2 is on the hub: names lack the prefix, and the output layer is tied."""
    file = copied_folder("gpt2") / "model.safetensors"
    weights = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    assert "transformers converts" in effect_of(file.parent)


def test_quantised_weights_are_refused(copied_folder):
    folder = copied_folder("llama", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=r"model\.policy\.path '.*' holds quantised weights"):
        load_model(ModelConfig(path=str(folder)))


def test_weights_in_a_dtype_that_needs_scales_are_refused(copied_folder):
    file = copied_folder("llama") / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"gives no weights: lm_head\.weight is stored as F8_E4M3"):
        load_model(ModelConfig(path=str(file.parent)))


def test_another_shape_is_named(copied_folder):
    message = r"gives no weights: model\.embed_tokens\.weight has shape \[32, 64\] in the file and \[40, 64\] by config"
    with pytest.raises(ConfigError, match=message):
        load_model(ModelConfig(path=str(copied_folder("llama", vocab_size=40))))


def test_a_missing_file_of_an_index_is_named(uneven_folder, tmp_path):
    folder = shutil.copytree(uneven_folder, tmp_path / "model")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=f"gives no weights: .*{gone.name}"):
        load_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_random_weights_are_those_of_transformers(family, model_folder):
    config = ModelConfig(path=str(model_folder(family)), init="random", seed=3)
    found = load_model(config)
    expected = empty_model(config)
    expected.to_empty(device="cpu")
    for module in expected.modules():
        module._is_hf_initialized = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        expected.init_weights()
    tied = set() if family == "llama" else {"transformer.wte.weight", "model.embed_tokens.weight"}  # drawn twice there
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        ours = found.state_dict(keep_vars=True).get(name, dict(found.named_buffers()).get(name))
        assert name in tied or torch.equal(ours, tensor), name
    for name in tied & dict(found.named_parameters()).keys():
        assert 0.2 < found.get_parameter(name).std() < 0.3


def test_the_generation_configuration_is_read(copied_folder):
    folder = copied_folder("llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7], "temperature": 0.5}))
    assert load_model(ModelConfig(path=str(folder))).generation_config.eos_token_id == [1, 7]


def test_the_critics_trunk_is_that_of_its_model(model_folder):
    policy = ModelConfig(path=str(model_folder("llama")))
    critic = load_critic(CriticConfig(trunk=ModelConfig(path=str(model_folder("gpt2")))), policy)
    expected = AutoModelForCausalLM.from_pretrained(model_folder("gpt2"), dtype=torch.float32).base_model
    assert_same(dict(critic.trunk.named_parameters()), dict(expected.named_parameters()))


# ---- shards ---------------------------------------------------------------------------------------------------------


@meshes
@pytest.mark.parametrize("name", ["gemma", "uneven"])
def test_shards_are_parts_of_the_files(name, world_size, axes, loaded, model_folder, uneven_folder):
    folder = uneven_folder if name == "uneven" else model_folder(name)
    result, expected = loaded(world_size, axes, name), reference_tensors(folder)
    assert_same(result["policy"], expected)
    assert_same(result["reference"], expected)
    trunk = {f"trunk.{key.removeprefix('model.')}": tensor for key, tensor in expected.items() if key[:5] == "model"}
    head = load_critic(CriticConfig(seed=4), ModelConfig(path=str(folder))).head
    assert_same(result["critic"], trunk | dict(head.named_parameters(prefix="head")))
    assert result["frozen"] == [False, False]
    assert result["meta"] == []
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(result["logits"], whole(torch.tensor([[3, 4, 5, 6, 7, 8]])).logits, rtol=1e-4, atol=1e-5)
    if name == "gemma":
        assert result["effects"] == [STREAMED, f"reference: {STREAMED}", f"critic: {STREAMED}"]


@pytest.mark.parametrize(("world_size", "axes"), [*CASES[:2], *CASES[3:5]], ids=str)
def test_no_rank_reads_or_holds_more_than_its_part(world_size, axes, loaded, model_folder):
    result = loaded(world_size, axes, "gemma")
    parameters = [p for name, p in reference_tensors(model_folder("gemma")).items() if p.requires_grad]
    num_parts = world_size // axes.get("replicate", 1)
    total = sum(parameter.nbytes for parameter in parameters)
    assert result["bytes"] == [total // num_parts] * world_size
    largest = max(parameter.numel() for parameter in parameters) // num_parts
    assert max(result["largest"]) <= largest


@meshes
def test_random_weights_depend_on_no_mesh(world_size, axes, loaded, model_folder):
    config = ModelConfig(path=str(model_folder("llama")), init="random", seed=5)
    alone, result = load_model(config), loaded(world_size, axes, "random")
    expected = dict(alone.named_parameters()) | dict(alone.named_buffers())
    assert_same(result["policy"], expected)
    assert_same(result["reference"], expected)
    assert result["generator_is_left"] == [True] * world_size
    assert result["effects"][0] == "weights drawn with seed 5, block by block"


def test_only_one_block_is_drawn_at_a_time(model_folder):
    """Before a block's values are handed out, the others have no memory."""
    config = ModelConfig(path=str(model_folder("llama")), init="random")
    twin = empty_model(config)
    for name, _ in loading._drawn_weights(twin, torch.device("cpu"), 0):
        real = {key for key, parameter in twin.named_parameters() if not parameter.is_meta}
        assert name in real or "rotary_emb" in name
        assert len({key.split(".")[2] if "layers" in key else key for key in real}) <= 1
