"""A promise without a check, or a check without a promise, is a fault of the interface or of the kit."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
from rlplug_devkit.promised import OF_EVERY_PLUGIN, PROMISED
from rlplug_devkit.promises import KITS, promises_of


@pytest.mark.parametrize("kind", PROMISED)
def test_every_promise_is_a_sentence_of_the_interface(kind: str) -> None:
    """Would miss an interface that changes while the kit stays."""
    module, promised = PROMISED[kind]
    text = re.sub(r"\s+", " ", inspect.getsource(importlib.import_module(module)))
    assert [sentence for sentence in promised if sentence not in text] == []


@pytest.mark.parametrize("kind", PROMISED)
def test_every_check_has_a_promise_and_every_promise_a_check(kind: str) -> None:
    checks = {promise.check.removeprefix("test_") for promise in promises_of(KITS[kind])}
    held = {check for of_sentence in PROMISED[kind][1].values() for check in of_sentence}
    others = {check for of_sentence in OF_EVERY_PLUGIN.values() for check in of_sentence}
    assert held - checks == set()
    assert checks - held - others == set()
