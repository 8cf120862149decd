"""Engines that stream, named by their import path in the tests' command lines."""

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "testing"))

from capable_engines import CapableRollout

from rlplug.interfaces import EngineCapabilities


class BesideTheTrainer(CapableRollout):
    """Generates in threads, as servers do in their processes."""

    capabilities = EngineCapabilities(streaming=True, colocated=False, disaggregated=True)


class OneGroupLater(BesideTheTrainer):
    """Begins each request a little after the one before, so that groups complete one after another."""

    def submit(self, requests, sampling):
        for request in requests:
            self._threads.submit(time.sleep, 0.05)
            super().submit([request], sampling)
