"""Sharded passes on real processes, run once for all tests that look at their results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    """Return the results of ``fsdp_worker.py`` on that many processes."""
    done = {}

    def run(world_size):
        if world_size not in done:
            folder = tmp_path_factory.mktemp(f"sharded-{world_size}")
            run_ranks([str(Path(__file__).with_name("fsdp_worker.py")), str(folder), str(world_size)], world_size)
            done[world_size] = torch.load(folder / "results.pt")
        return done[world_size]

    return run


@pytest.fixture(scope="session")
def ranks():
    return run_ranks
