"""Checks that runs of one process do not see each other's options."""

from __future__ import annotations

import pytest

from rlplug_devkit.algorithms.checks import AlgorithmChecks, larger
from rlplug_devkit.algorithms.training import train, trained_otherwise
from rlplug_devkit.claims import DOES_NOT_APPLY
from rlplug_devkit.tasks.calls import NOT_COMPARED


class RunChecks(AlgorithmChecks):
    """Checks of an algorithm beside another object of its class."""

    def test_runs_do_not_share_their_options(self) -> None:
        """A notebook or a sweep sets up the next run while the former one's objects are there."""
        alone, beside = self._ready(), self._ready()
        try:
            expected = train(alone, self.run, 0, 2)
            if self._ready_for(larger(self.run)) is None:
                pytest.skip(f"{DOES_NOT_APPLY}setup refuses {larger(self.run)}")
            found = train(beside, self.run, 0, 2)
        except Exception:  # noqa: BLE001 - a check of its own
            pytest.skip(NOT_COMPARED)
        differs = trained_otherwise(found, expected, self.tolerance)
        assert not differs, (
            f"when another object was set up for another run, {differs}: keep what setup gets in self, and not in the "
            "class or its module."
        )
