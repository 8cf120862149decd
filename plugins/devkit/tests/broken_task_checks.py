"""Checks on rewards, environments and sources with a mistake each; ``test_task_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_tasks
from broken_tasks import AnswersLate, EnvironmentChecks, RewardChecks, SourceChecks, TakesTooLong
from test_task_sabotage import CAUGHT_BY

KITS = {"reward": RewardChecks, "environment": EnvironmentChecks, "source": SourceChecks}
SLOW = (TakesTooLong, AnswersLate)

for kind, mistakes in CAUGHT_BY.items():
    for name in ("Fine", "Guess", "Rows")[list(KITS).index(kind)], *mistakes:
        part = getattr(broken_tasks, name)
        settings = {kind: part} | ({"deadline_s": 0.05} if part in SLOW else {})
        globals()[f"Test{name}"] = type(f"Test{name}", (KITS[kind],), settings)

TestFineAndScaled = type("TestFineAndScaled", (RewardChecks,), {"reward": broken_tasks.FineAndScaled})
