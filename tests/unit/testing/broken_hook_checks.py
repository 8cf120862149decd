"""Checks on plugins of hooks with a mistake each; ``test_hook_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_hooks
from test_hook_sabotage import CAUGHT_BY, MISSED

from rlplug.testing import HooksConformance

for name in ("Fine", *CAUGHT_BY, *MISSED):
    made = broken_hooks.plugins[name]
    globals()[f"Test{name}"] = type(f"Test{name}", (HooksConformance,), {"make_plugin": lambda _, made=made: made})
