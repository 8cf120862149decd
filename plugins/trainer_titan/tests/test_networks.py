"""TorchTitan's models, packed and sharded, give what transformers gives for one sequence at a time.

They catch: another rotary embedding or epsilon, sequences that see each other, a row that the tensor axis splits
unevenly, gradients that a rank counts twice or not at all, and weights under a wrong name or with permuted rows.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from titan_cases import CONFIGS, batch, make_folder, transformers_results
from transformers import AutoModelForCausalLM

from rlplug.interfaces import FP8Weights
from rlplug.weight_sync.buckets import weight_buckets

torch.set_num_threads(1)
MESHES = {"one": (1, 1), "shard 2": (2, 1), "tensor 2": (2, 2), "shard 2, tensor 2": (4, 2)}
"""Ranks in all, and on the tensor axis."""
CLOSE = {"rtol": 0.0, "atol": 1e-5}

nightly = [pytest.param(mesh, marks=pytest.mark.nightly) for mesh in ("one", "shard 2, tensor 2")]


@pytest.fixture(scope="module", params=["shard 2", "tensor 2", *nightly])
def mesh(request):
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_folder(family, root / family) for family in CONFIGS}


@pytest.fixture(scope="module")
def expected(folders):
    return {family: transformers_results(folder) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory, folders):
    """Return the results of all families on a mesh, and their exported folders, from one start of its processes."""
    known: dict[int, dict[str, dict]] = {}

    def run(mesh):
        world_size, _ = MESHES[mesh]
        if world_size not in known:
            jobs = tmp_path_factory.mktemp(f"ranks-{world_size}") / "jobs.json"
            mine = {name: tensor for name, (ranks, tensor) in MESHES.items() if ranks == world_size}
            plan = {
                f"{name}/{family}/{fused}": {"folder": str(folder), "tensor": tensor, "fused": fused}
                for name, tensor in mine.items()
                for family, folder in folders.items()
                for fused in (False, True)
            }
            jobs.write_text(json.dumps(plan))
            run_ranks([str(Path(__file__).with_name("titan_worker.py")), str(jobs)], world_size)
            results = torch.load(jobs.parent / "results.pt")
            known[world_size] = {name: result | {"folder": jobs.parent / name} for name, result in results.items()}
        return known[world_size]

    return run


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("fused", [False, True])
def test_logprobs_and_gradients(mesh, family, fused, done, expected):
    result, truth = done(mesh)[f"{mesh}/{family}/{fused}"], expected[family]
    torch.testing.assert_close(result["logprobs"], truth["logprobs"], **CLOSE)
    torch.testing.assert_close(result["entropy"], truth["entropy"], **CLOSE)
    assert result["gradients"].keys() == truth["gradients"].keys()
    for name, gradient in truth["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-4, msg=f"gradient of {name}")
    norm = torch.stack([gradient.norm() for gradient in truth["gradients"].values()]).norm()
    assert result["norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("trunk", "fused"), [("own", False), ("shared", False), ("shared", True)])
def test_critics(mesh, family, trunk, fused, done, expected):
    """They catch values of another state, and a trunk that misses a part of the gradient or gets it twice."""
    result, truth = done(mesh)[f"{mesh}/{family}/{fused}"]["critics"][trunk], expected[family]
    torch.testing.assert_close(result["values"], truth["values"], **CLOSE)
    assert truth["values"].abs().max() > 0.01
    gradients = Counter(truth["value gradients"])
    if trunk == "shared":  # where the policy's loss flows back too
        gradients.update(truth["gradients"])
    assert result["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-5, atol=1e-5, msg=f"gradient of {name}")


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
    result, (world_size, _) = done(mesh)[f"{mesh}/{family}/False"], MESHES[mesh]
    blocks = [f"decoder.layers.{index}" for index in range(3)]
    ends = ["decoder.tok_embeddings", "decoder.lm_head"] if family == "llama" else []
    assert sorted(result["units"]) == sorted(["", *blocks, *ends])
    config = CONFIGS[family]
    assert result["largest shard"] == config.intermediate_size * config.hidden_size // world_size
