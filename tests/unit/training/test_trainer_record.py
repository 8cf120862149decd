"""A checkpoint is of one trainer; one without a record is of the default one, which wrote all of them once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplug.errors import ConfigError
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.training.trainer_record import check_trainer_record


class Other(TransformersTrainer):
    """Another trainer."""


CHECKPOINT = Path("runs/sorting/003/checkpoints/step-00000002")
RECORDS = [(TransformersTrainer(), {}), (TransformersTrainer(), {"trainer": "TransformersTrainer"})]
STRANGERS = [
    (TransformersTrainer(), {"trainer": "Other"}, "Resume with Other,"),
    (Other(), {"trainer": "TransformersTrainer"}, "Resume with null, the default,"),
    (Other(), {}, "Resume with null, the default,"),
]


@pytest.mark.parametrize(("trainer", "state"), [*RECORDS, (Other(), {"trainer": "Other"})])
def test_its_own_is_accepted(trainer, state):
    check_trainer_record(trainer, CHECKPOINT, {"rlplug": state})


@pytest.mark.parametrize(("trainer", "state", "fix"), STRANGERS)
def test_another_trainers_is_refused(trainer, state, fix):
    with pytest.raises(ConfigError) as refused:
        check_trainer_record(trainer, CHECKPOINT, {"rlplug": state})
    message = str(refused.value)
    assert message.startswith(f"model.trainer is {type(trainer).__name__}, and checkpoint {CHECKPOINT} was written ")
    assert fix in message
    assert "model.policy.path runs/sorting/003/policy, model.policy.init pretrained" in message


def test_one_outside_of_a_run_names_no_folder():
    with pytest.raises(ConfigError, match=r"model\.policy\.path the policy folder of its run"):
        check_trainer_record(Other(), Path("copied"), {"rlplug": {}})
