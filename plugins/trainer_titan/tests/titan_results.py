"""Jobs of ``titan_worker.py``, and how what they give compares with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import torch
from ranks import run_ranks

CLOSE = {"rtol": 0.0, "atol": 1e-5}


def job(folder, axes=MappingProxyType({}), options=MappingProxyType({}), optimizations=()):
    """Return a job on the model of a folder."""
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


def assert_parity(result, truth):
    """Compare logprobs, entropies and gradients."""
    torch.testing.assert_close(result["logprobs"], truth["logprobs"], **CLOSE)
    torch.testing.assert_close(result["entropy"], truth["entropy"], **CLOSE)
    assert result["gradients"].keys() == truth["gradients"].keys()
    for name, gradient in truth["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-4, msg=f"gradient of {name}")
