"""What the loop asks of its process."""

import gc
from collections.abc import Iterator

import pytest
import torch

from rlplug.setup.start import freeze_gc, limit_host_threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    former = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(former)


@pytest.mark.parametrize(("device", "num_threads"), [("cuda:0", 1), ("cpu", 2)])
def test_the_host_works_in_one_thread_beside_a_gpu_alone(two_threads: None, device: str, num_threads: int) -> None:
    limit_host_threads(torch.device(device))
    assert torch.get_num_threads() == num_threads


def test_what_exists_is_walked_by_no_later_collection() -> None:
    kept = [[] for _ in range(1000)]
    freeze_gc()
    try:
        frozen, tracked = gc.get_freeze_count(), {id(item) for item in gc.get_objects()}
        assert frozen >= 1000
        assert not any(id(item) in tracked for item in kept)
    finally:
        gc.unfreeze()
