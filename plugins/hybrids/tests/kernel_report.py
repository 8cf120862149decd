"""Prints as JSON how models of some families compute packed rows with stand-ins for the packages of their kernels."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import kernel_stand_ins

kernel_stand_ins.install()

import torch
from hybrid_models import REFUSED, build, write
from rlplug_hybrids import HybridTrainer
from rlplug_hybrids.borders import keep_apart
from rlplug_hybrids.trainer import stateful_layers, way_of
from test_families import ONE, alone, gradients, largest_relative_error, loss, packed, sequences

from rlplug.interfaces import ModelConfig
from rlplug.models.loading import to_empty_on


def report_of(family: str) -> dict[str, Any]:
    model, ids = build(family).train(), sequences()
    oracle = alone(model, ids)
    loss(oracle, ids).backward()
    expected = gradients(model)
    kernel_stand_ins.CALLS.clear()
    as_it_comes = float((packed(model, ids) - oracle).abs().max())
    found: dict[str, Any] = {"unchanged": as_it_comes, "given": calls()}
    keep_apart(model)
    logprobs = packed(model, ids)
    found |= {"difference": float((logprobs - oracle).abs().max()), "given": calls()}
    loss(logprobs, ids).backward()
    found["gradients"] = largest_relative_error(gradients(model), expected)
    found["ways"] = sorted({way_of(layer) for layer in stateful_layers(model).values()})
    trainer = HybridTrainer()
    with tempfile.TemporaryDirectory() as folder:
        if family not in REFUSED:
            trainer.check(ModelConfig(str(write(family, Path(folder))), dtype="float32"), "model.policy", ONE)
    return found | {"calls at start": calls(), "conflicts": sorted(trainer.claims.conflicts)}


def loaded_on_the_cpu(family: str) -> dict[str, Any]:
    """Return what a policy that a trainer loaded on the CPU calls and says; the kernels are not used any more."""
    trainer = HybridTrainer()
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig(str(write(family, Path(folder))), init="random", dtype="float32")
        network: Any = trainer.empty_network(config, "model.policy")
        to_empty_on(network, torch.device("cpu"))
        said = trainer.load_weights(network, config, "model.policy").description
    network(input_ids=torch.arange(3, 9)[None], use_cache=True)
    packed(network, sequences())
    return {"calls loaded": calls(), "said": said}


def calls() -> dict[str, list[str]]:
    """Return which borders each kernel got since the last call."""
    given = {name: sorted(borders) for name, borders in kernel_stand_ins.CALLS.items()}
    kernel_stand_ins.CALLS.clear()
    return given


if __name__ == "__main__":
    reports = {family: report_of(family) for family in sys.argv[1:]}
    print(json.dumps({family: report | loaded_on_the_cpu(family) for family, report in reports.items()}))
