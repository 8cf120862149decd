"""Each option of Lightning's trainer is honoured or refused by name, and its callbacks act on RL steps."""

from __future__ import annotations

import inspect
from datetime import timedelta

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from rlplug.cli.configuration.trainer_options import (
    HONOURED,
    REFUSED,
    REFUSED_CALLBACKS,
    REFUSED_CHECKPOINT_ARGUMENTS,
    check_trainer_options,
)
from rlplug.cli.lightning_cli import in_order
from rlplug.errors import ConfigError


def test_every_option_of_the_trainer_is_decided() -> None:
    """Alone catches an option of a newer Lightning that the loop would ignore in silence."""
    assert sorted([*HONOURED, *REFUSED]) == sorted(set(inspect.signature(Trainer.__init__).parameters) - {"self"})


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_the_loop_ignores_is_refused_by_name(name: str) -> None:
    default = inspect.signature(Trainer.__init__).parameters[name].default

    check_trainer_options(Namespace({name: default}), {name: default})
    with pytest.raises(ConfigError, match=rf"^trainer\.{name} is 17, "):
        check_trainer_options(Namespace({name: 17}), {name: default})


@pytest.mark.parametrize("given", ["{}", "00:00:00:00", "soon"])
def test_a_run_of_no_time_is_refused(given: str) -> None:
    """Alone catches a run that ends with success before its first step: Lightning stops there without a word."""
    with pytest.raises(ConfigError, match=r"^trainer\.max_time is '.*', no time: write DD:HH:MM:SS"):
        check_trainer_options(Namespace(max_time=given), {})
    check_trainer_options(Namespace(max_time="00:00:00:05"), {})


@pytest.mark.parametrize("name", REFUSED_CALLBACKS)
def test_a_callback_that_the_loop_cannot_serve_is_refused_by_name(name: str) -> None:
    callback = Namespace(class_path=f"lightning.pytorch.callbacks.{name}", init_args=Namespace())

    with pytest.raises(ConfigError, match=rf"trainer\.callbacks\[0\] is {name}"):
        check_trainer_options(Namespace(callbacks=[callback]), {})
    assert name == "SpikeDetection" or hasattr(lightning_callbacks, name)


def test_arguments_of_model_checkpoint_without_a_meaning_are_refused() -> None:
    assert set(REFUSED_CHECKPOINT_ARGUMENTS) <= set(inspect.signature(ModelCheckpoint.__init__).parameters)
    for name in REFUSED_CHECKPOINT_ARGUMENTS:
        callback = Namespace(class_path="ModelCheckpoint", init_args=Namespace({name: 3}))
        with pytest.raises(ConfigError, match=f"ModelCheckpoint's {name} is 3"):
            check_trainer_options(Namespace(callbacks=[callback]), {})


@pytest.mark.parametrize(
    ("part", "argument"), [("callbacks.ModelCheckpoint", "dirpath"), ("loggers.CSVLogger", "save_dir")]
)
def test_a_folder_that_cannot_be_made_is_refused(part: str, argument: str) -> None:
    """Alone catches a run that ends when it first saves there, or in a traceback of the logger."""
    made = Namespace(class_path=f"lightning.pytorch.{part}", init_args=Namespace({argument: "/dev/null/x"}))
    key = "logger" if "Logger" in part else "callbacks"

    with pytest.raises(
        ConfigError, match=rf"trainer\.{key}\[0\]\.init_args\.{argument} is '/dev/null/x', and /dev/null"
    ):
        check_trainer_options(Namespace({key: made}), {})
    check_trainer_options(Namespace(logger=[True], callbacks=[]), {})


def test_what_ends_a_run_comes_before_what_saves_its_end() -> None:
    """Alone catches a ``trainer.max_time`` after which ``ModelCheckpoint`` has not saved the last step."""
    ordered = in_order([ModelCheckpoint(), EarlyStopping("reward/mean"), Timer(timedelta(1))])

    assert [type(each).__name__ for each in ordered] == [
        "Timer",
        "LightningCallbacks",
        "ModelCheckpoint",
        "EarlyStopping",
    ]
