"""TorchTitan's models, packed and sharded, give what transformers gives for one sequence at a time.

They catch: another rotary embedding or epsilon, sequences that see each other, a row that the tensor axis splits
unevenly, gradients that a rank counts twice or not at all, and weights under a wrong name or with permuted rows.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from ranks import run_ranks
from titan_cases import CONFIGS, batch, make_folder, transformers_results
from transformers import AutoModelForCausalLM

from rlplug.interfaces import FP8Weights
from rlplug.weight_sync.buckets import weight_buckets

torch.set_num_threads(1)
MESHES = {
    "one": (1, {}),
    "shard 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "replicate 2": (2, {"replicate": 2}),
    "shard 2, tensor 2": (4, {"tensor": 2}),
    "replicate 2, shard 2": (4, {"replicate": 2}),
}
"""Ranks in all, and axes of the strategy."""
COMPILE = {"compile": True, "compile_backend": "aot_eager"}
SPEED = {
    "selective": ({"activation_checkpoint": "selective"}, ()),
    "full": ({"activation_checkpoint": "full"}, ()),
    "compile": (COMPILE, ()),
    "GradientCheckpointing": ({}, ("GradientCheckpointing",)),
    "SelectiveCheckpointing": ({}, ("SelectiveCheckpointing",)),
    "compile, selective": (COMPILE | {"activation_checkpoint": "selective"}, ()),
    "CompileBlocks": ({}, ("CompileBlocks",)),
    "CompileBlocks, selective": ({"activation_checkpoint": "selective"}, ("CompileBlocks",)),
}
"""Options of the trainer, and optimizations, that change what blocks compute and keep, not their results."""
NIGHTLY = ("compile, selective", "CompileBlocks", "CompileBlocks, selective")
SPEED_FAMILY, SPEED_MESH = "qwen3", "shard 2"
CLOSE = {"rtol": 0.0, "atol": 1e-5}

nightly = [
    pytest.param(mesh, marks=pytest.mark.nightly) for mesh in ("one", "shard 2, tensor 2", "replicate 2, shard 2")
]


@pytest.fixture(scope="module", params=["shard 2", "tensor 2", "replicate 2", *nightly])
def mesh(request):
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_folder(family, root / family) for family in CONFIGS}


@pytest.fixture(scope="module")
def expected(folders):
    return {family: transformers_results(folder) for family, folder in folders.items()}


def job(folder, axes=MappingProxyType({}), options=MappingProxyType({}), optimizations=()):
    return {
        "folder": str(folder),
        "axes": dict(axes),
        "options": dict(options),
        "optimizations": list(optimizations),
    }


def results_of(folder, jobs, world_size):
    """Run the jobs on so many ranks, and return what they give, each with its exported folder."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_ranks([str(Path(__file__).with_name("titan_worker.py")), str(folder / "jobs.json")], world_size)
    return {name: result | {"folder": folder / name} for name, result in torch.load(folder / "results.pt").items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory, folders):
    """Return the results of all families on a mesh, from one start of its processes."""

    @functools.cache
    def of_size(world_size):
        jobs = {
            f"{name}/{family}/{bool(fused)}": job(folder, axes, {}, fused)
            for name, (ranks, axes) in MESHES.items()
            if ranks == world_size
            for family, folder in folders.items()
            for fused in ((), ("FusedLogprobs",))
        }
        return results_of(tmp_path_factory.mktemp(f"ranks-{world_size}"), jobs, world_size)

    return lambda mesh: of_size(MESHES[mesh][0])


@pytest.fixture(scope="module")
def done_fast(tmp_path_factory, folders):
    """Return the results of all options of the same night or push, on two shards."""

    @functools.cache
    def run(is_nightly):
        names = [name for name in SPEED if (name in NIGHTLY) == is_nightly]
        jobs = {name: job(folders[SPEED_FAMILY], {}, *SPEED[name]) for name in names}
        return results_of(tmp_path_factory.mktemp("speed"), jobs, 2)

    return lambda name: run(name in NIGHTLY)[name]


def assert_like_transformers(result, truth):
    torch.testing.assert_close(result["logprobs"], truth["logprobs"], **CLOSE)
    torch.testing.assert_close(result["entropy"], truth["entropy"], **CLOSE)
    assert result["gradients"].keys() == truth["gradients"].keys()
    for name, gradient in truth["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-4, msg=f"gradient of {name}")
    norm = torch.stack([gradient.norm() for gradient in truth["gradients"].values()]).norm()
    assert result["norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("fused", [False, True])
def test_logprobs_and_gradients(mesh, family, fused, done, expected):
    result, truth = done(mesh)[f"{mesh}/{family}/{fused}"], expected[family]
    assert_like_transformers(result, truth)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly if n in NIGHTLY else ()) for n in SPEED])
def test_options_for_speed_change_no_result(name, done_fast, expected, folders):
    """It catches names that a wrapper changed, and a block that is compiled again for each layer."""
    result, truth = done_fast(name), expected[SPEED_FAMILY]
    assert_like_transformers(result, truth)
    assert result["weights"].keys() == truth["weights"].keys()
    for weight, value in truth["weights"].items():
        assert torch.equal(result["weights"][weight], value), weight
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (result["folder"], folders[SPEED_FAMILY])]
    assert torch.equal(*(model(batch().input_ids).logits for model in models))
    assert result["graphs"] == ("ompile" in name), "all blocks share one graph"
    num_blocks = CONFIGS[SPEED_FAMILY].num_hidden_layers
    said = f"{num_blocks} blocks" if SPEED[name][1] else f"{num_blocks} blocks, weights"
    assert any(said in effect for effect in result["effects"])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_sync_sends_the_weights_of_the_checkpoint(mesh, family, done, expected, folders):
    result, truth = done(mesh)[f"{mesh}/{family}/False"], expected[family]["weights"]
    assert result["weights"].keys() == truth.keys()
    for name, weight in truth.items():
        assert torch.equal(result["weights"][name], weight), name
    hub = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32)
    fp8 = FP8Weights(quantized=tuple(name for name in truth if "proj" in name), kept=())
    sent = dict(pair for bucket in weight_buckets(hub, torch.float32, fp8=fp8) for pair in bucket)
    assert sent.keys() == result["fp8"].keys()
    for name, tensor in sent.items():
        assert torch.equal(result["fp8"][name].float(), tensor.float()), name


@pytest.mark.parametrize("family", CONFIGS)
def test_an_export_opens_in_transformers(mesh, family, done, folders):
    exported = done(mesh)[f"{mesh}/{family}/False"]["folder"]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (exported, folders[family])]
    assert json.loads((exported / "config.json").read_text())["architectures"] == [type(models[1]).__name__]
    ids = batch().input_ids
    assert torch.equal(*(model(ids).logits for model in models))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_rank_holds_its_shards_alone(mesh, family, done):
    """FSDP and tensor parallelism both divide the largest matrix, one of an MLP."""
    result, (world_size, axes) = done(mesh)[f"{mesh}/{family}/False"], MESHES[mesh]
    blocks = [f"decoder.layers.{index}" for index in range(3)]
    ends = ["decoder.tok_embeddings", "decoder.lm_head"] if family == "llama" else []
    assert sorted(result["units"]) == sorted(["", *blocks, *ends])
    config = CONFIGS[family]
    assert (
        result["largest shard"]
        == config.intermediate_size * config.hidden_size * axes.get("replicate", 1) // world_size
    )
