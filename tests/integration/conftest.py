"""Fixtures that several files share."""

from __future__ import annotations

import pytest
from build_distributions import build
from distributions import all_distributions
from wheel_environment import PROBE, Environment, make_environment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Wheels of rlplug and its plugins in a new virtual environment that does not see the sources."""
    tmp = tmp_path_factory.mktemp("environment")
    return make_environment(tmp, build([*all_distributions(), PROBE], tmp / "dist"))
