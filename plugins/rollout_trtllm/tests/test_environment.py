"""The environment of a start: what must be gone is gone, what must be there is, and the trainer gets its own back."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from rlplug_rollout_trtllm.environment import NEEDED, engine_environment
from rlplug_rollout_trtllm.gpu import visible_devices

from rlplug.errors import ConfigError

CONTRACT = json.loads((Path(__file__).parent / "trtllm_contract.json").read_text())["environment"]
LAUNCHERS = {"PMI_RANK": "0", "PMIX_ID": "a", "MPI_X": "1", "OMPI_COMM_WORLD_SIZE": "8", "SLURM_JOB_ID": "77"}
TRAINERS = {"RANK": "3", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "x", "PYTORCH_CUDA_ALLOC_CONF": "y"}


@pytest.fixture(autouse=True)
def trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHERS, **TRAINERS}.items():
        monkeypatch.setenv(name, value)
    for name in NEEDED:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


def test_an_engine_starts_as_the_contract_says() -> None:
    with engine_environment():
        assert not [name for name in os.environ if re.match(CONTRACT["unset_before_start"], name)]
        assert all(os.environ[name] == value for name, value in (each.split("=") for each in CONTRACT["set"]))


def test_workers_have_no_place_of_the_trainers() -> None:
    with engine_environment():
        assert not TRAINERS.keys() & os.environ.keys()


def test_the_trainer_gets_its_own_back() -> None:
    with engine_environment("4"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    assert {name: os.environ[name] for name in (*LAUNCHERS, *TRAINERS)} == {**LAUNCHERS, **TRAINERS}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_it_gets_them_back_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), engine_environment():
        raise ZeroDivisionError
    assert os.environ["SLURM_JOB_ID"] == "77"


def test_devices_that_were_not_named_are_not_named_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with engine_environment("1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_what_is_needed_stays() -> None:
    with engine_environment():
        pass
    assert os.environ["TLLM_DISABLE_MPI"] == "1"


def test_devices_are_counted_among_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_devices(2, 2) == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_devices(2, 2) == "2,3"


def test_devices_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5ebe9f43")
    with pytest.raises(ConfigError, match="name GPUs by their index"):
        visible_devices(0, 1)
