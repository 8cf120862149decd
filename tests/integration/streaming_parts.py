"""Engines that stream, named by their import path in the tests' command lines."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "plugins/devkit/tests"))

from capable_engines import CapableRollout

from rlplug.interfaces import EngineCapabilities


class BesideTheTrainer(CapableRollout):
    """Generates in threads, as servers do in their processes."""

    capabilities = EngineCapabilities(streaming=True, colocated=False, disaggregated=True)


class OneGroupLater(BesideTheTrainer):
    """Generates one request at a time, and rests after each group, long enough for the trainer to take it alone."""

    GROUP_SIZE = 4
    REST_S = 0.4

    def start(self, policy, placement):
        super().start(policy, placement)
        self._threads = ThreadPoolExecutor(1)

    def submit(self, requests, sampling):
        for number, request in enumerate(requests, start=1):
            super().submit([request], sampling)
            if number % self.GROUP_SIZE == 0:
                self._threads.submit(time.sleep, self.REST_S)
