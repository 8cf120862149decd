"""``OptimizationConformance``: checks that every optimization must pass."""

from __future__ import annotations

from rlplug_devkit.optimizations.edits import EditChecks
from rlplug_devkit.optimizations.networks import NetworkChecks
from rlplug_devkit.optimizations.stated import StatedChecks


# pytest runs the checks of base classes from the last to the first
class OptimizationConformance(NetworkChecks, EditChecks, StatedChecks):
    """All checks of optimizations, to subclass in a test module that returns them from ``make_optimizations``.

    Tiny models are built, sharded and loaded as a run does it, on CPUs: by one rank in the test's process, and by two
    processes (gloo). The checks compare a policy with the optimization to one without, in float32 but for one:
    logprobs, entropies, gradients, micro-batches, the weights that a sync sends, steps and a resume, what a forward
    pass keeps. Each variant also runs together with another optimization, which recomputes whole blocks. Processes are
    started once for all checks. A variant that refuses one of the two meshes with a ConfigError is skipped there. GPUs
    and time are not checked.

    Example::

        class TestMine(OptimizationConformance):
            def make_optimizations(self) -> Mapping[str, Sequence[Optimization]]:
                return {"every block": [Mine()], "every second block": [Mine(every=2)]}
    """
