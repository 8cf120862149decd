"""The kit on each faulty engine: classes for a pytest inside the tests' own, see ``test_engine_faults.py``."""

from __future__ import annotations

import importlib

from engine_faults.faults import FAULTS, remember_process
from rlplug_devkit import EngineConformance

for module in (
    "of_prompts",
    "of_limits",
    "of_sampling",
    "of_weights",
    "of_promises",
    "of_streams",
    "of_processes",
    "of_reports",
):
    importlib.import_module(f"engine_faults.{module}")


class FaultyEngine(EngineConformance):
    """All checks of an engine whose fault may be in its process, which the next engine shares."""

    __test__ = False
    num_draws = 2000

    @classmethod
    def setup_class(cls) -> None:
        cls.restore = staticmethod(remember_process())

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.restore()


def checks_of(engine: type) -> type:
    """Return the class of all checks of an engine."""
    return type(f"Test{engine.__name__}", (FaultyEngine,), {"make_engine": lambda _: engine(), "__test__": True})


globals().update({f"Test{name}": checks_of(entry.engine) for name, entry in FAULTS.items()})
