"""Sharded passes on real processes, run once for all tests that look at their results."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def run_ranks(command, world_size):
    """Run a script once per rank, with the environment that torchrun would give it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(outputs)
