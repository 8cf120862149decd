"""The kit of hooks, over the plugin that implements every hook."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from rlplug_devkit import HooksConformance

SOURCE = Path(__file__).parents[3] / "tests/plugins/rlplug_probe/src"


class TestProbe(HooksConformance):
    @pytest.fixture(scope="class", autouse=True)
    def _path(self) -> None:
        patch = pytest.MonkeyPatch()
        patch.syspath_prepend(str(SOURCE))
        yield
        patch.undo()

    def make_plugin(self) -> ModuleType:
        return importlib.import_module("rlplug_probe.plugin")
