"""Which checks of the conformance kit run nightly: those that start servers anew, half a minute each."""

from __future__ import annotations

import pytest

RESTARTS_SERVERS = (
    "test_starts_again_after_close",  # on every push: test_server.py, after a server was killed
    "test_tied_embeddings_are_sent_once[one bucket]",  # on every push, as the next: the kit on the engine in-process
    "test_weights_of_experts_are_used[one bucket]",
    "test_weights_of_experts_are_used[one parameter]",
)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_server_conformance.py" and item.name in RESTARTS_SERVERS:
            item.add_marker(pytest.mark.nightly)
