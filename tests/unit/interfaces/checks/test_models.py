"""Faults of trainers and optimizations: each is refused by one message that names the call."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from rlplug.errors import RunError
from rlplug.interfaces import Effect
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.models.build import check_effects, check_network


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_effects(PluginCall("X.effects"), None), "a list of Effect, each with a description"),
        (lambda: check_effects(PluginCall("X.effects"), ["replaced"]), "a list of Effect, each with a description"),
        (lambda: check_effects(PluginCall("X.effects"), [Effect("")]), "a list of Effect, each with a description"),
        (lambda: check_network(PluginCall("X.empty_network"), None), "return a torch.nn.Module"),
        (
            lambda: check_network(PluginCall("X.e"), nn.Linear(1, 1)),
            "the meta device; it returned weight as float32",
        ),
    ],
)
def test_models_that_cannot_train(call: Any, words: str) -> None:
    with pytest.raises(RunError, match=re.escape(words)):
        call()
