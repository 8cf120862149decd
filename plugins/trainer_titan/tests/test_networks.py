"""TorchTitan's models, packed and sharded, give what transformers gives for one sequence at a time.

They catch: another rotary embedding or epsilon, sequences that see each other, a row that the tensor axis splits
unevenly, gradients that a rank counts twice or not at all, and weights under a wrong name or with permuted rows.
"""

from __future__ import annotations

import functools
import json
from collections import Counter

import pytest
import torch
from rlplug_trainer_titan.decoders import sparse_layers
from titan_cases import CONFIGS, batch, make_folder, transformers_results
from titan_results import CLOSE, assert_parity, job, results_of
from transformers import AutoModelForCausalLM

from rlplug.interfaces import FP8Weights
from rlplug.weight_sync.buckets import weight_buckets

pytestmark = pytest.mark.kit

torch.set_num_threads(1)
MESHES = {
    "one": (1, {}, 1),
    "shard 2": (2, {}, 1),
    "tensor 2": (2, {"tensor": 2}, 1),
    "expert 2": (2, {}, 2),
    "tensor 2, expert 2": (2, {"tensor": 2}, 2),
    "shard 2, tensor 2": (4, {"tensor": 2}, 1),
    "replicate 2, shard 2": (4, {"replicate": 2}, 1),
    "shard 4, expert 2": (4, {}, 2),
    "shard 2, tensor 2, expert 2": (4, {"tensor": 2}, 2),
    "shard 2, tensor 2, expert 4": (4, {"tensor": 2}, 4),
    "replicate 2, expert 2": (4, {"replicate": 2}, 2),
}
"""Ranks in all, axes of the strategy, and ranks of expert parallelism."""
DENSE, SPARSE = (tuple(name for name in CONFIGS if ("moe" in name) == is_sparse) for is_sparse in (False, True))
CASES = (
    {  # TorchTitan splits experts over the tensor axis alone with wrong gradients: see the refusals
        mesh: SPARSE if expert > 1 else (*DENSE, *(() if axes else SPARSE))
        for mesh, (_, axes, expert) in MESHES.items()
    }
    | {"shard 2": SPARSE, "tensor 2": DENSE[:1], "tensor 2, expert 2": SPARSE[:1]}
)
"""The conformance kit has the other dense models on two ranks; meshes of four have what those of two leave out."""
ON_A_PUSH = ("tensor 2", "tensor 2, expert 2")

every_case = pytest.mark.parametrize(
    ("mesh", "family"),
    [
        pytest.param(mesh, family, marks=() if mesh in ON_A_PUSH else pytest.mark.nightly)
        for mesh, families in CASES.items()
        for family in families
    ],
)


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

    @functools.cache
    def of_size(world_size):
        jobs = {
            f"{name}/{family}/{bool(fused)}": job(folders[family], axes, {"expert": expert}, fused)
            for name, (ranks, axes, expert) in MESHES.items()
            if ranks == world_size
            for family in CASES[name]
            for fused in (((),) if expert > 1 or (axes and ranks == 2) else ((), ("FusedLogprobs",)))
        }
        return results_of(tmp_path_factory.mktemp(f"ranks-{world_size}"), jobs, world_size)

    return lambda mesh: of_size(MESHES[mesh][0])


@every_case
def test_logprobs_and_gradients(mesh, family, done, expected):
    truth, results = expected[family], done(mesh)
    for fused in (False, True):
        if (name := f"{mesh}/{family}/{fused}") in results:
            assert_parity(results[name], truth)
            norm = torch.stack([gradient.norm() for gradient in truth["gradients"].values()]).norm()
            assert results[name]["norm"] == pytest.approx(float(norm), rel=1e-5)


@every_case
@pytest.mark.parametrize(("trunk", "fused"), [("own", False), ("shared", False), ("shared", True)])
def test_critics(mesh, family, trunk, fused, done, expected):
    """They catch values of another state, and a trunk that misses a part of the gradient or gets it twice."""
    if (name := f"{mesh}/{family}/{fused}") not in (results := done(mesh)):
        pytest.skip("FusedLogprobs is left out with expert parallelism, and where the conformance kit has it")
    result, truth = results[name]["critics"][trunk], expected[family]
    torch.testing.assert_close(result["values"], truth["values"], **CLOSE)
    assert truth["values"].abs().max() > 0.01
    gradients = Counter(truth["value gradients"])
    if trunk == "shared":  # where the policy's loss flows back too
        gradients.update(truth["gradients"])
    assert result["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-4, msg=f"gradient of {name}")


@every_case
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


@every_case
def test_an_export_opens_in_transformers(mesh, family, done, folders):
    exported = done(mesh)[f"{mesh}/{family}/False"]["folder"]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (exported, folders[family])]
    assert json.loads((exported / "config.json").read_text())["architectures"] == [type(models[1]).__name__]
    ids = batch().input_ids
    assert torch.equal(*(model(ids).logits for model in models))


@every_case
def test_every_rank_holds_its_shards_alone(mesh, family, done):
    """FSDP, tensor and expert parallelism all divide the largest parameter: of an MLP, or of all experts of a layer."""
    (world_size, axes, expert), config = MESHES[mesh], CONFIGS[family]
    result, sparse = done(mesh)[f"{mesh}/{family}/False"], sparse_layers(config)
    blocks = [f"decoder.layers.{index}" for index in range(3)]
    ends = [] if config.tie_word_embeddings else ["decoder.tok_embeddings", "decoder.lm_head"]
    experts = [f"{blocks[index]}.moe.routed_experts.inner_experts" for index in sparse] if expert > 1 else []
    assert sorted(result["units"]) == sorted(["", *blocks, *ends, *experts])
    rows = config.num_experts * config.moe_intermediate_size if sparse else config.intermediate_size
    num_shards = world_size // axes.get("replicate", 1)
    assert result["largest shard"] == rows * config.hidden_size // num_shards


@every_case
def test_a_rank_reads_what_it_holds_of_a_checkpoint(mesh, family, done):
    """Of Llama's queries and keys, whose rows are in another order, it reads no more than whole heads."""
    read = done(mesh)[f"{mesh}/{family}/False"]["read"]
    assert read == 1 if "llama" not in family else read < 1.2


@pytest.mark.parametrize("mesh", ["shard 2", "expert 2", "tensor 2, expert 2"])
def test_given_experts_take_the_place_of_the_routers_choice(mesh, done, folders, expected):
    """It catches experts of other tokens or layers, and scores that are not the router's, so that it cannot learn."""
    result = done(mesh)[f"{mesh}/qwen3_moe/False"]
    truth = transformers_results(folders["qwen3_moe"], is_given=True)
    assert (truth["logprobs"] - expected["qwen3_moe"]["logprobs"]).abs().max() > 0.1
    assert_parity(result["replay"], truth)
