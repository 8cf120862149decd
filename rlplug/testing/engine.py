"""``EngineConformance``: checks that every rollout engine must pass."""

from __future__ import annotations

from rlplug.testing.distribution import DistributionChecks
from rlplug.testing.fp8 import FP8Checks
from rlplug.testing.life import FirstChecks, LastChecks
from rlplug.testing.memory import SleepChecks
from rlplug.testing.routing import RoutingChecks
from rlplug.testing.streaming import StreamingChecks
from rlplug.testing.tokens import TokenChecks
from rlplug.testing.weights import OtherModelChecks, WeightChecks


# pytest runs the checks of base classes from the last to the first: those that need another engine come first and last
class EngineConformance(
    LastChecks,
    FP8Checks,
    RoutingChecks,
    OtherModelChecks,
    StreamingChecks,
    SleepChecks,
    WeightChecks,
    DistributionChecks,
    TokenChecks,
    FirstChecks,
):
    """All checks of a rollout engine, to subclass in a test module that returns the engine from ``make_engine``.

    The checks share an engine, and start others for tied embeddings, experts, routing and FP8; each check also runs
    alone. They make its calls in the order of the core, :mod:`rlplug.rollout.engine_states`, and as the only rank: an
    engine that several ranks run together is checked with one rank. Checks of a capability that the engine does not
    claim do not apply. The report at the end of pytest's output says, for each capability, whether it is claimed and
    how many of its checks passed, failed, or were skipped and why.

    Example::

        class TestMyEngine(EngineConformance):
            dtype = torch.bfloat16
            tolerances = BFLOAT16

            def make_engine(self) -> MyEngine:
                return MyEngine(memory_share=0.3)
    """
