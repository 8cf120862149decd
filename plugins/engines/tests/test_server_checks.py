"""GPUs that servers get, and what their answers about themselves are checked for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from rlplug_engines.servers.backend import EngineLabels
from rlplug_engines.servers.server_checks import (
    changed_options,
    check_server_fp8,
    devices_of_servers,
)

from rlplug.errors import ConfigError
from rlplug.interfaces import FP8Weights, Placement

LABELS = EngineLabels(engine="Tiny", colocated="TinyRollout", server_key="KEY", gpus_per_server="the size")
TRAINER = Placement(torch.device("cuda", 0), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_each_server_gets_as_many_as_it_takes() -> None:
    assert devices_of_servers([2, 3, 6, 7], 2, TRAINER, LABELS) == ["2,3", "6,7"]


def test_indices_are_among_what_the_trainer_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-abc")
    assert devices_of_servers([1, 2], 1, TRAINER, LABELS) == ["5", "GPU-abc"]


@pytest.mark.parametrize("gpus", [None, [], [1, 2, 3], [1, 1]])
def test_gpus_that_make_no_whole_servers_are_refused(gpus: list[int] | None) -> None:
    with pytest.raises(ConfigError, match=r"each server takes 2 \(the size\)"):
        devices_of_servers(gpus, 2, TRAINER, LABELS)


def test_gpus_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.gpus is \[8\], and the trainer sees 8 GPUs"):
        devices_of_servers([8], 1, TRAINER, LABELS)


def test_gpu_of_the_trainer_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="rollout.gpus has 0.*use TinyRollout"):
        assert devices_of_servers([0], 1, TRAINER, LABELS) == ["0"]


def test_options_that_were_set() -> None:
    @dataclass(frozen=True)
    class Options:
        size: int = 1
        name: str = ""

    assert changed_options(Options()) == set()
    assert changed_options(Options(name="a")) == {"name"}


def test_servers_with_other_layers_in_fp8_are_refused() -> None:
    fp8 = FP8Weights(("a.weight",), ("lm_head.weight",))
    check_server_fp8("Tiny", "http://a", None, None, "--overrides")
    check_server_fp8("Tiny", "http://a", fp8.quantization_config(), fp8, "--overrides")
    with pytest.raises(ConfigError, match=r"start it with --overrides '\{\"quantization_config\": .*lm_head"):
        check_server_fp8("Tiny", "http://a", None, fp8, "--overrides")
    with pytest.raises(ConfigError, match="start it without a quantization_config in its --overrides"):
        check_server_fp8("Tiny", "http://a", fp8.quantization_config(), None, "--overrides")
