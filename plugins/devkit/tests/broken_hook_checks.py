"""Checks on plugins of hooks with a mistake each; ``test_hook_sabotage.py`` has what finds each."""

from __future__ import annotations

import os

import broken_hooks
import torch
from rlplug_devkit import HooksConformance
from test_hook_sabotage import CAUGHT_BY, MISSED


class HookTests(HooksConformance):
    @classmethod
    def teardown_class(cls) -> None:
        """Undo what mistakes left in the process, which is that of all tests."""
        torch.set_grad_enabled(True)
        os.environ.pop("MADE_STEP", None)


for name in ("Fine", *CAUGHT_BY, *MISSED):
    made = broken_hooks.plugins[name]
    globals()[f"Test{name}"] = type(f"Test{name}", (HookTests,), {"make_plugin": lambda _, made=made: made})
