"""The order of files: with two workers, the long ones come first, so that both end at about the same time."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put command lines, then plugins, before unit tests, which are many small files."""
    items.sort(key=lambda item: ("integration" not in item.path.parts) + ("unit" in item.path.parts))
