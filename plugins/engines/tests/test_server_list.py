"""The list of servers that a launcher keeps, as an engine reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlplug_engines.servers.http_client import HTTPClient
from rlplug_engines.servers.server_list import FILE_VARIABLE, ListedServer, ServerList, write_server_list

from rlplug.errors import RunError
from rlplug.interfaces import EngineFault


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "servers.json"))
    return tmp_path / "servers.json"


def test_a_server_that_started_again_has_no_weights_though_its_url_is_the_same(
    file: Path, client: HTTPClient, url: str
) -> None:
    listed = ServerList.of_launcher("MyEngine")
    assert listed is not None
    write_server_list(file, [ListedServer(url, 0)])
    listed.wait_until_healthy(client, 10.0, lambda: False)
    write_server_list(file, [ListedServer(url, 0), ListedServer("http://127.0.0.1:9", 0)])
    listed.check_unchanged()  # one more takes nothing away
    write_server_list(file, [ListedServer(url, 1)])
    with pytest.raises(EngineFault, match=f"MyEngine on {url} ended or was lost with its node"):
        listed.check_unchanged()


def test_servers_that_do_not_answer_are_waited_for_until_the_deadline(file: Path, client: HTTPClient, url: str) -> None:
    listed = ServerList(file, "MyEngine")
    for servers in ([], [ListedServer(url, 0), ListedServer("http://127.0.0.1:9", 0)]):
        write_server_list(file, servers)
        with pytest.raises(RunError, match=r"not healthy after rollout\.start_deadline_s 0 s"):
            listed.wait_until_healthy(client, 0.0, lambda: False)


def test_a_run_that_is_told_to_stop_waits_for_no_server(file: Path, client: HTTPClient) -> None:
    """Where its launcher was killed, none comes, and the wait would take the time in which the run saves."""
    write_server_list(file, [])
    with pytest.raises(EngineFault, match="MyEngine is waited for no longer"):
        ServerList(file, "MyEngine").wait_until_healthy(client, 3600.0, lambda: True)


@pytest.mark.parametrize("text", ["{", "[1]", '[{"url": "http://a"}]', '[{"url": "file:///a", "start": 0}]'])
def test_a_list_of_another_form_is_refused_with_its_path(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(RunError, match=f"{file} \\({FILE_VARIABLE}\\)"):
        ServerList(file, "MyEngine").read()


def test_without_a_launcher_there_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    assert ServerList.of_launcher("MyEngine") is None
