"""Ranges of options hold for objects that are made in Python."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest

from rlplug.config import Limits, RunConfig
from rlplug.data.datamodule import PromptDataModule
from rlplug.data.sources import FileSource
from rlplug.distributed.checkpoint import RLCheckpoint
from rlplug.errors import ConfigError
from rlplug.interfaces.trainer import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.models.lora.config import LoRAConfig
from rlplug.recording.run_folder import RunFolder
from rlplug.rollout.config import PartialRollout, TurnOptions
from rlplug.rollout.hf_engine import HFRollout
from rlplug.training.batch_plan import BatchSizes
from rlplug.training.validation.config import ValidationConfig
from rlplug.types import SamplingParams
from rlplug.types.ranges import hints_of, range_of
from rlplug.weight_sync.config import WeightSyncConfig

MADE_WITH: dict[type, dict[str, Any]] = {
    BatchSizes: {},
    CriticConfig: {},
    FileSource: {"path": "x.jsonl"},
    HFRollout: {},
    Limits: {},
    LoRAConfig: {},
    ModelConfig: {"path": "x"},
    PartialRollout: {},
    PromptDataModule: {"train": None},
    RLCheckpoint: {},
    RunConfig: {"policy": None, "algorithm": None, "optimizer": None},
    RunFolder: {},
    SamplingParams: {},
    TurnOptions: {},
    ValidationConfig: {},
    WeightSyncConfig: {},
}


@pytest.mark.parametrize("kind", MADE_WITH, ids=lambda kind: kind.__name__)
def test_a_number_out_of_its_range_is_refused_in_python(kind: type) -> None:
    """Alone catches a class whose ranges only the command line checks, or whose attribute has another name."""
    ranges = {name: found for name, hint in hints_of(kind).items() if (found := range_of(hint)) is not None}
    assert ranges
    for name, allowed in ranges.items():
        for wrong in (allowed.low - 1, allowed.high * 2 + 1, math.nan, math.inf):
            with pytest.raises(ConfigError, match=rf"(^|\.){name} is .*: give a (finite )?number"):
                kind(**MADE_WITH[kind] | {name: wrong})


@pytest.mark.parametrize("kind", MADE_WITH, ids=lambda kind: kind.__name__)
def test_defaults_are_in_their_ranges(kind: type) -> None:
    if kind is not PartialRollout:  # which needs a limit
        kind(**MADE_WITH[kind])


def test_no_number_of_a_configuration_lacks_a_range() -> None:
    """Alone catches a field of a block, such as one that is null by default, that holds any number."""
    blocks = [kind for kind in MADE_WITH if dataclasses.is_dataclass(kind)]
    numbers = [
        f"{kind.__name__}.{name}"
        for kind in blocks
        for name, hint in hints_of(kind).items()
        if range_of(hint) is None and any(choice in (int, float) for choice in (hint, *get_args(hint)))
    ]
    assert numbers == []
