"""Checks of algorithms without one each, on what it alone catches; ``test_algorithm_sabotage.py`` runs them."""

from __future__ import annotations

import broken_algorithm_checks
from test_algorithm_sabotage import CAUGHT_ALONE, CAUGHT_BY

for mistake in CAUGHT_ALONE:
    checks = vars(broken_algorithm_checks)[f"Test{mistake}"]
    excused = {CAUGHT_BY[mistake]: "to see whether another check catches it"}
    globals()[f"Test{mistake}"] = type(f"Test{mistake}", (checks,), {"excused": excused})
