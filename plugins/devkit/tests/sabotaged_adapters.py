"""Engines with a mistake each in the adapters that they serve. ``test_sabotage.py`` runs the checks on them."""

from __future__ import annotations

from capable_engines import ServesAdapters
from rlplug_devkit.engines.weights import AdapterChecks
from sabotage import Sabotaged


class KeepsTheFirstAdapters(ServesAdapters):
    def merged(self, received):
        return self.__dict__.setdefault("_first", received)


class AddsToWhatItHas(ServesAdapters):
    """Adds each update to weights that have the one before."""

    def restore(self, weights):
        if not self.__dict__.get("_has_weights"):
            super().restore(weights)
        self._has_weights = True


class IgnoresAlpha(ServesAdapters):
    def scale(self, adapters):
        return 1.0


class TakesHalfOfThem(ServesAdapters):
    """Keeps what did not come."""

    def require_all(self, validator):
        pass


class TestServing(AdapterChecks):
    def make_engine(self) -> ServesAdapters:
        return ServesAdapters()


class TestFirstAdapters(Sabotaged, AdapterChecks):
    engine = KeepsTheFirstAdapters


class TestAddedAdapters(Sabotaged, AdapterChecks):
    engine = AddsToWhatItHas


class TestAlpha(Sabotaged, AdapterChecks):
    engine = IgnoresAlpha


class TestHalfOfThem(Sabotaged, AdapterChecks):
    engine = TakesHalfOfThem
