"""Export: a plain Hugging Face folder from shards."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MiniMaxM2Config, MixtralConfig, Qwen3MoeConfig

from rlplug.models.config import ModelConfig, load_tokenizer
from rlplug.models.export import export_policy
from rlplug.models.loading import load_model
from rlplug.models.transformers_trainer import TRANSFORMERS

MESHES = [(1, {}), (2, {}), (2, {"tensor": 2})]


@pytest.fixture(scope="module")
def exported(run_jobs, model_folder, tmp_path_factory):
    done = {}

    def of(world_size, axes, max_bytes):
        key = str((axes, max_bytes))
        if world_size not in done:
            out, jobs = tmp_path_factory.mktemp("exported"), {}
            for size, these in MESHES:
                for limit in (1 << 14, 1 << 30):
                    if size == world_size:
                        target = str(out / f"{len(jobs)}")
                        jobs[str((these, limit))] = {
                            "kind": "export",
                            "axes": these,
                            "folder": str(model_folder("qwen3")),
                            "out": target,
                            "max_bytes": limit,
                        }
            run_jobs(world_size, jobs)
            done[world_size] = {name: job["out"] for name, job in jobs.items()}
        return done[world_size][key]

    return of


@pytest.mark.parametrize(("world_size", "axes"), MESHES, ids=str)
@pytest.mark.parametrize("max_bytes", [1 << 14, 1 << 30])
def test_from_pretrained_opens_it(max_bytes, world_size, axes, exported, model_folder, tmp_path):
    folder = exported(world_size, axes, max_bytes)
    found, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    original = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"), dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert found.config.architectures == ["Qwen3ForCausalLM"]
    expected = dict(original.named_parameters())
    assert dict(found.named_parameters()).keys() == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in found.named_parameters())
    assert (
        AutoTokenizer.from_pretrained(folder).get_vocab()
        == AutoTokenizer.from_pretrained(model_folder("qwen3")).get_vocab()
    )


def export(folder, out, **options):
    config = ModelConfig(path=str(folder), dtype="float32")
    model = load_model(config)
    export_policy(model, load_tokenizer(config), torch.float32, out, 0, TRANSFORMERS, **options)
    return model


def test_a_network_without_generation_config_is_exported(model_folder, tmp_path):
    """``read_generation_config`` of a folder without that file is ``None``, and a trainer hands it on."""
    config = ModelConfig(path=str(model_folder("llama")), dtype="float32")
    model = load_model(config)
    model.generation_config = None
    export_policy(model, load_tokenizer(config), torch.float32, tmp_path / "out", 0, TRANSFORMERS)
    assert not (tmp_path / "out/generation_config.json").exists()
    assert (tmp_path / "out/config.json").exists()


def test_files_are_bounded_and_indexed(model_folder, tmp_path):
    """The index is the one that transformers writes."""
    export(model_folder("llama"), tmp_path / "out", max_bytes=1 << 14)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for file in files:
        tensors = load_file(tmp_path / "out" / file).values()
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 1 << 14
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    theirs = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]


def test_one_file_needs_no_index(model_folder, tmp_path):
    export(model_folder("llama_tied"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    original = load_file(model_folder("llama_tied") / "model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())


SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("max_bytes", [1, 1 << 30])
@pytest.mark.parametrize(
    ("config", "expert"),
    [
        (MixtralConfig(**SIZES, **HEADS, num_local_experts=3), "model.layers.1.block_sparse_moe.experts.2.w3"),
        (
            Qwen3MoeConfig(**SIZES, **HEADS, num_experts=3, moe_intermediate_size=24, mlp_only_layers=[0]),
            "model.layers.1.mlp.experts.2.up_proj",
        ),
        (  # which saves a buffer too
            MiniMaxM2Config(
                **(SIZES | HEADS | {"intermediate_size": 16, "head_dim": 8, "num_local_experts": 4, "rotary_dim": 8}),
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                bos_token_id=2,
                eos_token_id=1,
            ),
            "model.layers.1.block_sparse_moe.experts.2.w3",
        ),
    ],
    ids=["mixtral", "qwen3_moe", "minimax_m2"],
)
def test_converted_names_are_those_of_the_hub_again(config, expert, max_bytes, model_folder, tmp_path):
    """Experts are one matrix in the model and many in the file."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "in")
    AutoTokenizer.from_pretrained(model_folder("llama")).save_pretrained(tmp_path / "in")
    original = load_file(tmp_path / "in" / "model.safetensors")
    policy = export(tmp_path / "in", tmp_path / "out", max_bytes=max_bytes)
    found = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    assert f"{expert}.weight" in found
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    expected = dict(policy.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in opened.named_parameters())
