"""Engines that stream, named by their import path in the tests' command lines."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "testing"))

from capable_engines import CapableRollout

from rlplug.interfaces import EngineCapabilities


class BesideTheTrainer(CapableRollout):
    """Generates in threads, as servers do in their processes."""

    capabilities = EngineCapabilities(streaming=True, colocated=False, disaggregated=True)
