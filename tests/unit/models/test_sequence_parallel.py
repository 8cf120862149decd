"""Sequence parallelism: ranks that share a row compute what one rank computes alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

WORKER = str(Path(__file__).with_name("sequence_worker.py"))
ROWS = [(2, 9), (1, 3), (4, 0), (3, 12), (2, 2), (5, 1)]
"""44 tokens; a part of the row can begin inside a prompt, and one of four ranks predicts little"""


FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "mistral"]
"""All have 4 heads and 2 key-value heads: on 4 ranks, two share one."""
CASES = {family: (family, ROWS) for family in FAMILIES} | {
    "filling": ("llama", [(2, 3)]),
    "filling without positions": ("gpt2", [(2, 1), (10, 22)]),  # it has 32, and the last row is as long
}


@pytest.fixture(scope="module")
def computed(model_folder, make_batch, run_ranks, tmp_path_factory):
    """Return the results of ``sequence_worker.py`` on that many ranks, by case and name."""
    done = {}

    def compute(world_size):
        if world_size not in done:
            folders = {case: tmp_path_factory.mktemp(f"{case}-{world_size}") / "model" for case in CASES}
            for case, (family, rows) in CASES.items():
                shutil.copytree(model_folder(family), folders[case])
                batch = make_batch(rows, seed=2)
                weights = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(6))
                save_file(batch.tensors() | {"weights": weights}, folders[case] / "batch.safetensors")
            run_ranks([WORKER, *map(str, folders.values())], world_size)
            done[world_size] = {case: load_file(folder / "results.safetensors") for case, folder in folders.items()}
        return done[world_size]

    return compute


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.nightly) for size in (2, 4)])
def test_ranks_that_share_a_row_equal_one(case, world_size, computed):
    """In the case "filling" five tokens lie on four ranks: parts of two, and the last is all filling."""
    alone, shared = computed(1)[case], computed(world_size)[case]
    assert alone.keys() == shared.keys()
    for name, expected in alone.items():
        round_off = 1e-5 * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(shared[name], expected, rtol=1e-4, atol=round_off, msg=lambda m, n=name: f"{n}: {m}")


def test_heads_that_do_not_divide_are_refused(computed):
    with pytest.raises(AssertionError, match=r"trainer\.strategy\.init_args\.sequence is 3"):
        computed(3)
