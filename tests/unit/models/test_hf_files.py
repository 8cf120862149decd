"""A name on a Hub that does not answer is refused within seconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from rlplug.errors import ConfigError
from rlplug.models import hf_files
from rlplug.models.hf_files import check_folder, hub_is_reachable


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_files, "HUB_S", 0.5)
    hub_is_reachable.cache_clear()
    yield
    hub_is_reachable.cache_clear()


def test_a_hub_that_cannot_be_reached_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the retries of the Hub's client: 82 s without a network, and more behind a firewall that drops."""
    with socket.socket() as silent, socket.socket() as closed:
        for listener in (silent, closed):
            listener.bind(("127.0.0.1", 0))
        silent.listen()
        for listener in (silent, closed):  # one that never answers, and one that refuses
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
            hub_is_reachable.cache_clear()
            began = time.monotonic()
            with pytest.raises(ConfigError, match=r"model.policy.path 'acme/model': no folder .* cannot be reached"):
                check_folder("acme/model", "model.policy")
            assert time.monotonic() - began < 5


def test_a_cached_model_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_files, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    monkeypatch.setattr(hf_files, "hub_is_reachable", lambda: False)
    check_folder("acme/model", "model.policy")
    assert constants.HF_HUB_OFFLINE  # its files are read without asking for each


def test_a_run_that_is_told_to_stay_offline_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hf_files, "hub_is_reachable", lambda: pytest.fail("it was asked"))
    with pytest.raises(ConfigError, match="is not asked, as HF_HUB_OFFLINE says"):
        check_folder("acme/model", "model.policy")
