"""Compilation and checkpointing, TorchTitan's and the core's, change no result of a dense model."""

from __future__ import annotations

import functools

import pytest
import torch
from titan_cases import CONFIGS, batch, make_folder, transformers_results
from titan_results import assert_parity, job, results_of
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.kit

FAMILY = "qwen3"
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
NIGHTLY = tuple(name for name in SPEED if name != "compile, selective")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(folder):
    return transformers_results(folder)


@pytest.fixture(scope="module")
def done(tmp_path_factory, folder):
    """Return the results of all options of the same night or push, on two shards."""

    @functools.cache
    def run(is_nightly):
        jobs = {name: job(folder, {}, *SPEED[name]) for name in SPEED if (name in NIGHTLY) == is_nightly}
        return results_of(tmp_path_factory.mktemp("speed"), jobs, 2)

    return lambda name: run(name in NIGHTLY)[name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly if n in NIGHTLY else ()) for n in SPEED])
def test_options_for_speed_change_no_result(name, done, truth, folder):
    """It catches names that a wrapper changed, and a block that is compiled again for each layer."""
    result = done(name)
    assert_parity(result, truth)
    assert result["weights"].keys() == truth["weights"].keys()
    for weight, value in truth["weights"].items():
        assert torch.equal(result["weights"][weight], value), weight
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (result["folder"], folder)]
    assert torch.equal(*(model(batch().input_ids).logits for model in models))
    assert result["graphs"] == ("ompile" in name), "all blocks share one graph"
    num_blocks = CONFIGS[FAMILY].num_hidden_layers
    said = f"{num_blocks} blocks" if SPEED[name][1] else f"{num_blocks} blocks, weights"
    assert any(said in effect for effect in result["effects"])
