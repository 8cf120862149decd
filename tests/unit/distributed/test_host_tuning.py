"""What the loop asks of its process."""

import gc

import pytest
import torch

from rlplug.distributed.host_tuning import freeze_gc, limit_host_threads


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    return numbers


def test_beside_a_gpu_the_host_works_in_one_thread(asked: list[int]) -> None:
    limit_host_threads(torch.device("cuda", 0))
    assert asked == [1]


def test_on_a_cpu_threads_stay_as_they_are(asked: list[int]) -> None:
    limit_host_threads(torch.device("cpu"))
    assert asked == []


def test_what_exists_is_walked_by_no_later_collection() -> None:
    kept = [[] for _ in range(1000)]
    freeze_gc()
    try:
        frozen, tracked = gc.get_freeze_count(), {id(item) for item in gc.get_objects()}
        assert frozen >= 1000
        assert not any(id(item) in tracked for item in kept)
    finally:
        gc.unfreeze()
