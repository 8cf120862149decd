"""Lightning's callbacks act on RL steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from rlplug_watch.lightning_callbacks import LightningCallbacks

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import StepRecord
from rlplug.training.validation.config import ValidationConfig


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
    LightningCallbacks([EarlyStopping("validate/pass@1", mode="max")]).on_train_start(None, module)


@pytest.mark.parametrize("monitor", ["reward/mean", "validate/reward_mean", "validate/math/pass@8"])
@pytest.mark.parametrize(
    ("made", "does"), [(EarlyStopping, "stops when that rises"), (ModelCheckpoint, "keeps the low")]
)
def test_a_score_is_not_taken_at_its_lowest(monitor: str, made: type, does: str) -> None:
    """Alone catches a run that ends as soon as its reward rises, and a best checkpoint that is the worst."""
    module = SimpleNamespace(rollout_step=0, plan=SimpleNamespace(total_steps=4))
    module.config = SimpleNamespace(validation=ValidationConfig(every_n_steps=2))

    with pytest.raises(ConfigError, match=rf"{made.__name__} monitors '{monitor}' with mode min.*{does}.*to max"):
        LightningCallbacks([made(monitor=monitor)]).on_train_start(None, module)
    for callback in (made(monitor=monitor, mode="max"), made(monitor="reward/std")):
        LightningCallbacks([callback]).on_train_start(None, module)


@pytest.mark.parametrize("missing", ["val_loss", "validate/y"])
def test_a_metric_that_no_step_has_is_named_with_those_that_there_are(missing: str) -> None:
    steps = [{"loss": 1.0, "validate/x": 0.5}]

    with pytest.raises(RunError, match=rf"step 1: EarlyStopping monitors '{missing}'.*There are loss, validate/x"):
        run_steps(EarlyStopping(missing), steps)
    assert run_steps(EarlyStopping(missing, strict=False), steps) == 1


def test_what_was_saved_after_the_checkpoint_of_a_resume_is_set_aside(tmp_path: Path) -> None:
    """Alone catches an abandoned policy that is shown as the best one, or one that was deleted and is still known."""
    best = tmp_path / "best"
    for step in (1, 3, 4):
        (best / f"step={step}.ckpt").mkdir(parents=True)
        torch.save({"rlplug": {"rollout_step": step}}, best / f"step={step}.ckpt" / "meta.pt")
    (best / "abandoned-1").mkdir()
    saver = ModelCheckpoint(monitor="reward/mean", mode="max", save_top_k=2)
    saver.best_k_models = {str(best / f"step={step}.ckpt"): torch.tensor(float(step)) for step in (1, 2)}
    config = SimpleNamespace(validation=ValidationConfig())
    module = SimpleNamespace(
        rollout_step=2, step=3, run_dir=tmp_path, config=config, plan=SimpleNamespace(total_steps=9)
    )
    served = LightningCallbacks([saver])
    served.on_train_start(None, module)
    trainer = FakeTrainer(is_global_zero=True, strategy=SimpleNamespace(broadcast=lambda value: value))
    served.on_train_batch_end(trainer, module, None, None, 0)  # an interrupt took it back: nothing is moved
    assert len([*best.iterdir()]) == 4

    module.rollout_step, served.savers[saver] = 3, 2  # the saver looks at even steps
    trainer.should_stop = False
    served.on_train_batch_end(trainer, module, None, None, 0)
    assert sorted(path.name for path in best.iterdir()) == ["abandoned-1", "abandoned-2", "step=1.ckpt"]
    assert sorted(path.name for path in (best / "abandoned-2").iterdir()) == ["step=3.ckpt", "step=4.ckpt"]
    assert list(saver.best_k_models) == [str(best / "step=1.ckpt")]
