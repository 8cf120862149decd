"""Environment variables are changed for a while, and a process of an engine gets none of the trainer's place."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from rlplug_engines.colocated import environment_variables, is_trainer_variable, process_kept, recursion_limit_kept


def test_variables_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUG_OLD", "before")
    monkeypatch.setenv("RLPLUG_GONE", "before")
    monkeypatch.delenv("RLPLUG_NEW", raising=False)
    former = dict(os.environ)

    def change() -> None:
        with environment_variables({"RLPLUG_OLD": "now", "RLPLUG_GONE": None, "RLPLUG_NEW": "now"}):
            assert (os.environ["RLPLUG_OLD"], os.environ["RLPLUG_NEW"]) == ("now", "now")
            assert "RLPLUG_GONE" not in os.environ
            del os.environ["RLPLUG_NEW"]
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        change()
    assert dict(os.environ) == former


def test_what_a_library_changes_at_its_start_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPLUG_OLD", "before")
    monkeypatch.setenv("RLPLUG_GONE", "before")
    former, hook, limit = dict(os.environ), sys.excepthook, sys.getrecursionlimit()
    threads = torch.get_num_threads()
    with process_kept(), recursion_limit_kept():
        torch.set_num_threads(threads + 1)
        sys.setrecursionlimit(limit + 1)
        os.environ |= {"RLPLUG_OLD": "now", "RLPLUG_NEW": "now"}
        del os.environ["RLPLUG_GONE"]
        sys.excepthook = lambda *_: None
    assert dict(os.environ) == former
    assert sys.excepthook is hook
    assert torch.get_num_threads() == threads
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize(
    "name",
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
        *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_what_torchrun_sets_is_the_trainers(name: str) -> None:
    assert is_trainer_variable(name)


@pytest.mark.parametrize("name", ["PATH", "CUDA_VISIBLE_DEVICES", "MY_RANK", "RANKS", "ROLE_NAMES", "NCCL_DEBUG"])
def test_other_variables_are_not(name: str) -> None:
    assert not is_trainer_variable(name)
