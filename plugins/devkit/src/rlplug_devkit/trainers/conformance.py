"""``TrainerConformance``: checks that every trainer must pass."""

from __future__ import annotations

from rlplug_devkit.trainers.networks import NetworkChecks, RefusalChecks
from rlplug_devkit.trainers.passes import PassChecks
from rlplug_devkit.trainers.weights import FolderChecks, ProcessChecks, SyncChecks


# pytest runs the checks of base classes from the last to the first
class TrainerConformance(ProcessChecks, FolderChecks, SyncChecks, PassChecks, NetworkChecks, RefusalChecks):
    """All checks of a trainer, to subclass in a test module that returns the trainer from ``make_trainer``.

    Tiny models of each type in ``models`` are built, sharded and loaded as a run does it, in float32 on CPUs: by one
    rank in the test's process, and by two processes (gloo) on the shard axis and on each axis that the trainer claims.
    The checks compare them with transformers' models of the same folders, on one sequence at a time. Processes are
    started once for all checks, when the first one asks. A model that the trainer refuses on a claimed axis with a
    ConfigError is skipped there. Critics are not checked, and bf16, GPUs and optimizations are not.

    Example::

        class TestMyTrainer(TrainerConformance):
            models = ("llama",)

            def make_trainer(self) -> MyTrainer:
                return MyTrainer()
    """
