"""A promise of rewards, environments or sources without a check, or a check without a promise, is a fault of one."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest
from rlplug_devkit import DataSourceConformance, EnvironmentConformance, RewardConformance
from rlplug_devkit.tasks import promised

from rlplug.data import sources
from rlplug.interfaces import environment, reward

KINDS = {
    "reward": (RewardConformance, promised.REWARD, reward),
    "environment": (EnvironmentConformance, promised.ENVIRONMENT, environment),
    "data source": (DataSourceConformance, promised.DATA_SOURCE, sources),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_sentence_is_the_interface_s_and_every_check_has_one(kind: str) -> None:
    """Alone catches an interface that changes while its kit stays, and a check that nobody was promised."""
    kit, sentences, module = KINDS[kind]
    assert isinstance(module, ModuleType)
    text = re.sub(r"\s+", " ", inspect.getsource(module))
    assert [sentence for sentence in sentences if sentence not in text] == []
    checks = {name.removeprefix("test_") for name in dir(kit) if name.startswith("test_")}
    held = {check for of_sentence in sentences.values() for check in of_sentence}
    others = {check for of_sentence in promised.OF_EVERY_TASK.values() for check in of_sentence}
    assert held - checks == set()
    assert checks - held - others == set()
