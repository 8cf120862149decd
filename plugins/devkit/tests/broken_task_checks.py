"""Checks on rewards, environments and sources with a mistake each; ``test_task_sabotage.py`` has what finds each."""

from __future__ import annotations

import broken_environments
import broken_rewards
import broken_sources
import careless_tasks
import drawn_rewards
import drawn_tasks
import hasty_tasks
import likely_tasks
import published_tasks
import simple_environments
import simple_rewards
import simple_sources
import unusual_tasks
from rlplug_devkit import make_prompt
from simple_environments import EnvironmentChecks
from simple_rewards import RewardChecks
from simple_sources import SourceChecks
from test_task_sabotage import CAUGHT_BY

from rlplug.data.sources import PromptRow

KITS = {"reward": RewardChecks, "environment": EnvironmentChecks, "source": SourceChecks}
SIMPLE = {"reward": simple_rewards, "environment": simple_environments, "source": simple_sources}
MORE = {"reward": broken_rewards, "environment": broken_environments, "source": broken_sources}
DEADLINES = {"TakesTooLong": 0.05, "AnswersLate": 0.05, "ConnectsFirst": 0.05, "ClosesLate": 0.05}
DEADLINES |= {"AwaitsForEver": 0.3, "BlocksItsLoop": 0.3, "WaitsForRows": 0.5, "WaitsAfterItsEnd": 2.0}
"""Of those that are late; others get more time than they may need on a busy machine."""
ENDS_AT = 1000
"""Rows by which the source without an end should have ended."""

RIGHT = {"Fine": "TakesLongForShort", "Guess": "SwapsItsAnswers", "Rows": "BeginsAtOne"}
EXPECTED = {
    "TakesLongForShort": [1 / 2, 1 / 16, 1.0, 1 / 12],
    "SwapsItsAnswers": [
        [("earlier", 0.0, False), ("earlier", 0.0, False), ("", 0.0, True)],
        [("later", 0.0, False), ("later", 0.0, False), ("later", 0.0, False)],
    ],
    "BeginsAtOne": [PromptRow("rows:0", "0>", "0", {})],
}
"""What the parts without mistakes answer."""
DRAWS = [f"rows:{index}" for index in (*range(10), *range(6))]
"""What the source without mistakes draws in order."""
SCALED = [[1 / 2, 1 / 16, 1.0, 1 / 12], [6 / 11, 13 / 88, 1.0, 1 / 6]]
"""Their rewards over the largest so far, in two rounds."""

for kind, mistakes in CAUGHT_BY.items():
    for name in ("Fine", "Guess", "Rows")[list(KITS).index(kind)], *mistakes:
        drawn = (published_tasks, drawn_rewards, drawn_tasks)
        modules = (MORE[kind], careless_tasks, hasty_tasks, likely_tasks, *drawn, SIMPLE[kind])
        part = next(vars(module)[name] for module in modules if hasattr(module, name))
        settings = {kind: part, "defaults": getattr(part, "DEFAULTS", {})}
        settings |= {"deadline_s": DEADLINES[name]} if name in DEADLINES else {}
        if name in EXPECTED or name in ("Fine", "Guess", "Rows"):
            values = EXPECTED[name if name in EXPECTED else RIGHT[name]]
            settings["expected"] = lambda _, values=values: values
        if name in ("Rows", "BeginsAtTheSecond"):
            settings["expected_draws"] = lambda _: DRAWS
        if name in ("Rows", "TrainsOnOtherRows"):
            settings["untrainable"] = lambda _, part=part: [("half", lambda: part("half"))]
        if name == "HalvesWhatItScales":
            settings["expected_scaled"] = lambda _: SCALED
        settings |= {"most_rows": ENDS_AT} if kind == "source" else {}
        if wrong := getattr(part, "WRONG", None):
            settings["broken_options"] = lambda _, part=part, wrong=wrong: [(*wrong, lambda: part(**wrong))]
        if hasattr(part, "ENDLESS"):
            settings["endless_turn"] = lambda _, turn=part.ENDLESS: turn
        if hasattr(part, "TURNS"):
            settings["turns"] = lambda _, turns=part.TURNS: turns
        if hasattr(part, "ROWS"):
            settings["sample_rows"] = part.ROWS
        if hasattr(part, "BROKEN_ANSWER"):
            settings["broken_prompts"] = lambda _, answer=part.BROKEN_ANSWER: [make_prompt("?", answer)]
        globals()[f"Test{name}"] = type(f"Test{name}", (KITS[kind],), settings)

TestFineAndScaled = type(
    "TestFineAndScaled", (RewardChecks,), {"reward": simple_rewards.FineAndScaled, "expected_scaled": lambda _: SCALED}
)
for name, checks in (unusual_tasks.CHECKS | drawn_rewards.CHECKS).items():
    globals()[f"Test{name}"] = type(f"Test{name}", (checks,), {})
