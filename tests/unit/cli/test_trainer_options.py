"""Each option of Lightning's trainer is honoured or refused by name, and its callbacks act on RL steps."""

from __future__ import annotations

import inspect
from datetime import timedelta
from types import SimpleNamespace

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
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
from rlplug.cli.lightning_callbacks import LightningCallbacks
from rlplug.cli.lightning_cli import in_order
from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import StepRecord
from rlplug.training.validation.config import ValidationConfig


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


class FakeTrainer(SimpleNamespace):
    def print(self, message: str) -> None:
        self.printed.append(message)


def run_steps(stopper: EarlyStopping, steps: list[dict[str, float]]) -> int:
    """Run steps with these metrics until the stopper ends the run, and return their number."""
    trainer = FakeTrainer(should_stop=False, printed=[], fast_dev_run=False, sanity_checking=False, callback_metrics={})
    trainer.state = SimpleNamespace(fn="fit")
    trainer.strategy = SimpleNamespace(reduce_boolean_decision=lambda stop, all: stop)
    trainer.current_epoch = 0
    served = LightningCallbacks([stopper])
    for step, metrics in enumerate(steps, start=1):
        trainer.callback_metrics |= {name: torch.tensor(value) for name, value in metrics.items()}  # former ones stay
        module = SimpleNamespace(rollout_step=step, step=step)
        served.step_ended(StepRecord(step, metrics, (), SimpleNamespace(), {}))
        served.on_train_batch_end(trainer, module, None, None, 0)
        if trainer.should_stop:
            assert len(trainer.printed) == 1
            return step
    return len(steps)


def test_early_stopping_counts_the_steps_that_have_the_metric() -> None:
    """Alone catches a validation's score that is looked at again in each step after it."""
    scores = [0.5, 0.4, 0.3]
    steps = [{"loss": 1.0} | ({"validate/x": scores[n // 3]} if n % 3 == 2 else {}) for n in range(9)]

    assert run_steps(EarlyStopping("validate/x", mode="max", patience=2), steps) == 9
    assert run_steps(EarlyStopping("validate/x", mode="max", patience=1), steps) == 6
    assert run_steps(EarlyStopping("loss", mode="min", patience=3), steps) == 4


def test_a_score_that_comes_after_its_weights_names_no_checkpoint() -> None:
    """Alone catches a best checkpoint that holds other weights than its score says."""
    module = SimpleNamespace(rollout_step=0, plan=SimpleNamespace(total_steps=4))
    module.config = SimpleNamespace(validation=ValidationConfig(every_n_steps=2, beside_training=True))
    saver = ModelCheckpoint(monitor="validate/pass@1")

    with pytest.raises(ConfigError, match=r"ModelCheckpoint monitors 'validate/pass@1'.*beside_training.*to false"):
        LightningCallbacks([saver]).on_train_start(None, module)
    LightningCallbacks([EarlyStopping("validate/pass@1")]).on_train_start(None, module)


@pytest.mark.parametrize("missing", ["val_loss", "validate/y"])
def test_a_metric_that_no_step_has_is_named_with_those_that_there_are(missing: str) -> None:
    steps = [{"loss": 1.0, "validate/x": 0.5}]

    with pytest.raises(RunError, match=rf"step 1: EarlyStopping monitors '{missing}'.*There are loss, validate/x"):
        run_steps(EarlyStopping(missing), steps)
    assert run_steps(EarlyStopping(missing, strict=False), steps) == 1


def test_what_ends_a_run_comes_before_what_saves_its_end() -> None:
    """Alone catches a ``trainer.max_time`` after which ``ModelCheckpoint`` has not saved the last step."""
    ordered = in_order([ModelCheckpoint(), EarlyStopping("reward/mean"), Timer(timedelta(1))])

    assert [type(each).__name__ for each in ordered] == [
        "Timer",
        "LightningCallbacks",
        "ModelCheckpoint",
        "EarlyStopping",
    ]
