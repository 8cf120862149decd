"""Sharded passes on real processes, run once for all tests that look at their results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from once import made_once
from ranks import run_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sharded(tmp_path_factory):
    """Return the results of ``fsdp_worker.py`` on that many processes."""
    done = {}

    def run(world_size):
        if world_size not in done:
            worker = str(Path(__file__).with_name("fsdp_worker.py"))

            def make(folder):
                run_ranks([worker, str(folder), str(world_size)], world_size)

            folder = made_once(tmp_path_factory, f"sharded-{world_size}", make)
            done[world_size] = torch.load(folder / "results.pt")
        return done[world_size]

    return run


@pytest.fixture(scope="session")
def ranks():
    return run_ranks
