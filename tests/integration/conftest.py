"""Fixtures that several files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from build_distributions import build
from distributions import all_distributions
from wheel_environment import PROBE


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdists and wheels of rlplug, its plugins and the probe."""
    folder = tmp_path_factory.mktemp("wheels") / "dist"
    build([*all_distributions(), PROBE], folder)
    return folder
