"""What layers hand to kernels, with stand-ins in torch that have the signatures of the packages' functions.

They show which borders arrive, not that the packages' kernels are right or fast: that takes a GPU.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from hybrid_models import HAS_WRAPPERS, write
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not HAS_WRAPPERS, reason="this transformers has kernels of another form")
FOLDER = Path(__file__).parent
BORDERS = {"causal_conv1d_fn": ["seq_idx"]}
DELTA = BORDERS | {"chunk_gated_delta_rule": ["cu_seqlens"]}
KIMI = BORDERS | {"chunk_kda": ["cu_seqlens"]}
MAMBA = BORDERS | {name: ["seq_idx"] for name in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")}
GIVEN: dict[str, dict[str, list[str]]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), KIMI),
    **dict.fromkeys(("nemotron_h", "falcon_h1", "granitemoehybrid", "bamba", "zamba2"), MAMBA),
    **dict.fromkeys(("lfm2", "lfm2_moe"), BORDERS),
    "jamba": {"causal_conv1d_fn": [], "selective_scan_fn": []},  # Mamba 1's scan takes none, so rows are padded
}
"""Borders that each kernel of a family must get in training."""
PUSHED = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2", "jamba")


@functools.cache
def reports(families: tuple[str, ...]) -> dict[str, Any]:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = run_forked([sys.executable, str(FOLDER / "kernel_report.py"), *families], env=variables, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in PUSHED else pytest.mark.nightly) for f in sorted(GIVEN)]
)
def test_kernels_get_the_borders_or_padded_rows(family: str) -> None:
    """Catches borders under a name that a kernel ignores, in which case it mixes sequences in silence."""
    pushed = family in PUSHED
    report = reports(tuple(f for f in sorted(GIVEN) if (f in PUSHED) is pushed))[family]
    assert report["unchanged"] > 1e-2  # transformers' own way leaks with kernels
    assert report["difference"] < 1e-5
    assert report["gradients"] < 1e-4  # stand-ins add token by token, transformers in chunks
    assert report["given"] == GIVEN[family]
    ways = " ".join(report["ways"])
    assert ("padded row" in ways) is (family == "jamba")
    assert "slow without" not in ways
    expected = ["CompileBlocks"] if family == "jamba" else ["SelectiveCheckpointing"]  # padded rows vary in shape
    assert report["conflicts"] == expected
    assert report["calls at start"] == {}  # kernels take no tensors of the host, where the first check runs
    assert report["calls loaded"] == {}  # nor of a run on the CPU, which Triton would end
    assert "slow without the kernels of" in report["said"]


@pytest.mark.nightly
def test_a_compiled_block_breaks_at_the_rule_alone(tmp_path: Path) -> None:
    """Catches what splits a block's graph, recomputed blocks that nothing compiles or that lack their decays, and
    gradients of convolutions in a layout that their kernel copies back."""
    write("qwen3_5_text", tmp_path)
    run_ranks([str(FOLDER / "kernel_compiled.py"), str(tmp_path)], 1)
    found = json.loads((tmp_path / "results.json").read_text())

    assert found["CompileBlocks"]["breaks"] == ["Skip calling `torch.compiler.disable()`d function"]
    assert found["both"]["graphs"] == found["CompileBlocks"]["graphs"] > 1
    for each in found.values():
        assert each["layouts"] == ["rows of tokens"]
        for name, expected in found["none"]["gradients"].items():
            torch.testing.assert_close(torch.tensor(each["gradients"][name]), torch.tensor(expected), atol=1e-5, rtol=0)
