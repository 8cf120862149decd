"""``EngineConformance``: checks that every rollout engine must pass."""

from __future__ import annotations

from rlplug_devkit.engines.distribution import DistributionChecks
from rlplug_devkit.engines.fp8 import FP8Checks
from rlplug_devkit.engines.given import GivenChecks
from rlplug_devkit.engines.life import CounterChecks, FirstChecks, LastChecks
from rlplug_devkit.engines.memory import PlanChecks, RoundChecks, SleepChecks
from rlplug_devkit.engines.plays import PlayChecks
from rlplug_devkit.engines.prompts import PromptChecks
from rlplug_devkit.engines.routing import RoutingChecks
from rlplug_devkit.engines.streaming import StreamingChecks
from rlplug_devkit.engines.tokens import FormChecks, StopChecks
from rlplug_devkit.engines.weights import AdapterChecks, OtherModelChecks, WeightChecks


# pytest runs the checks of base classes from the last to the first: from general to special, so that the first that
# fails names the cause; those that need another engine come first and last
class EngineConformance(
    LastChecks,
    FP8Checks,
    RoutingChecks,
    AdapterChecks,
    StopChecks,
    OtherModelChecks,
    PlayChecks,
    RoundChecks,
    StreamingChecks,
    SleepChecks,
    PromptChecks,
    WeightChecks,
    DistributionChecks,
    CounterChecks,
    GivenChecks,
    FormChecks,
    PlanChecks,
    FirstChecks,
):
    """All checks of a rollout engine, to subclass in a test module that returns the engine from ``make_engine``.

    The checks share an engine, and start others for tied embeddings, stop strings, experts, routing, adapters and FP8;
    each check also runs alone. They make its calls in the order of the core, :mod:`rlplug.rollout.engine_states`, and
    as the only rank: an engine that several ranks run together is checked with one rank. Checks of a capability that
    the engine does not claim do not apply. The report at the end of pytest's output says, for each capability, whether
    it is claimed and how many of its checks passed, failed, or were skipped and why.

    Example::

        class TestMyEngine(EngineConformance):
            dtype = torch.bfloat16
            tolerances = BFLOAT16

            def make_engine(self) -> MyEngine:
                return MyEngine(memory_share=0.3)
    """
