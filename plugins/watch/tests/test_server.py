"""The server of ``rlplug watch``: what it answers of runs, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import TestClient, TestServer
from report_runs import RUN, lines_of, make_run, timeline_line
from rlplug_watch.advice import advise
from rlplug_watch.report.run_data import read_run

from rlplug.cli.main import main

pytest.importorskip("plotly")

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e\ud800"


def ask(root: Path, use: Callable[[TestClient[Any, Any]], Awaitable[None]]) -> None:
    """Serve a folder, and let a function ask."""
    from rlplug_watch.page import make_app

    async def talk() -> None:
        async with TestClient(TestServer(make_app(root))) as client:
            await use(client)

    asyncio.run(talk())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one experiment, one killed before its second file, one that has only begun, and what is no run."""
    root = tmp_path_factory.mktemp("runs")
    for number in ("001", "002"):
        make_run(root / "arithmetic" / number, num_steps=60)
    config = root / "arithmetic/002/config.yaml"
    config.write_text(config.read_text().replace("seed_everything: 7", "seed_everything: 8"))
    bare = root / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text(lines_of("step,reward/mean\n1,0.25\n2,0.5\n") + '{"step": 3, "rew')
    (root / "begun").mkdir()
    (root / "begun/run.json").write_text(json.dumps({**RUN, "status": "running"}))
    (root / "notes").mkdir()
    return root


# ---- the answers ----------------------------------------------------------------------------------------------------


def test_runs_are_listed_with_their_newest_values(runs: Path) -> None:
    async def use(client: TestClient[Any, Any]) -> None:
        answer = await (await client.get("/api/runs")).json()
        found = {run["id"]: run for run in answer["runs"]}
        assert list(found) == ["arithmetic/001", "arithmetic/002", "bare", "begun"]
        assert found["bare"]["status"] == "unknown"
        assert found["bare"]["latest"]["reward"] == 0.5
        assert found["begun"]["latest"]["step"] is None
        whole = read_run(runs / "arithmetic/001").metrics.series("completion/length_mean")
        assert found["arithmetic/001"]["latest"]["length"] == whole.values[-1]

        (runs / "bare/metrics.jsonl").write_text(lines_of("step,reward/mean\n1,0.25\n2,0.5\n3,0.75\n"))
        again = await (await client.get("/api/runs")).json()
        assert {run["id"]: run for run in again["runs"]}["bare"]["latest"]["reward"] == 0.75

    ask(runs, use)


def origin(page: dict[str, Any]) -> str:
    """Return the title of the time axis of a page's last figure."""
    figures = page["sections"][-1][1]
    (work,) = [figure for figure in figures if figure["title"] == "Trainer and engine, step by step"]
    title: str = work["spec"]["layout"]["xaxis"]["title"]["text"]
    return title


def test_the_page_of_a_run_has_its_parts_and_is_sent_when_it_changed(runs: Path) -> None:
    async def use(client: TestClient[Any, Any]) -> None:
        address = f"/api/runs/{quote('arithmetic/001', safe='')}"
        page = await (await client.get(address)).json()
        assert page["header"]["status"] == "finished"
        assert [name for name, _ in page["sections"]] == ["Learning", "Stability", "Speed and memory"]
        assert [one["text"] for one in page["advice"]] == [
            one.text for one in advise(read_run(runs / "arithmetic/001").metrics, RUN)
        ]
        assert len(page["timeline"]["steps"]) == 20
        assert [phase["name"] for phase in page["timeline"]["phases"]][:2] == ["prompts", "sync"]
        known = await (await client.get(address, params={"known": page["version"]})).json()
        assert known == {"version": page["version"]}
        assert not page["has_timelines"]

        (runs / "arithmetic/001/groups.jsonl").write_text("".join(map(timeline_line, range(1, 9))))
        newest = await (await client.get(address, params={"known": page["version"]})).json()
        assert origin(newest) == "seconds since step 4 began"
        chosen = await (await client.get(address, params={"known": "", "steps": "2-3"})).json()
        assert origin(chosen) == "seconds since step 2 began"
        assert (await client.get(address, params={"steps": "3-2"})).status == 400

        begun = await (await client.get("/api/runs/begun")).json()
        assert begun["sections"] == []
        assert (await client.get("/api/runs/nothing")).status == 404

    ask(runs, use)


def test_curves_and_configurations_are_compared(runs: Path) -> None:
    both = [("run", "arithmetic/001"), ("run", "arithmetic/002")]

    async def use(client: TestClient[Any, Any]) -> None:
        answer = await (await client.get("/api/curves", params=[*both, ("run", "begun"), ("metric", "loss")])).json()
        assert answer["curves"]["begun"] is None
        assert len(answer["curves"]["arithmetic/002"]["y"]) == 60
        names = await (await client.get("/api/metrics", params=both)).json()
        assert names["metrics"] == sorted(names["metrics"])
        configs = await (await client.get("/api/configs", params=both)).json()
        assert configs["rows"] == [{"key": "seed_everything", "values": ["7", "8"]}]
        assert (await client.get("/api/curves", params={"metric": "loss"})).status == 400
        assert (await client.get("/api/curves", params=[*both, ("axis", "parsecs")])).status == 400

    ask(runs, use)


def test_values_of_any_form_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<img src=x onerror=alert(1)>", num_steps=5)
    keys = ["status", "message", "started", "finished", "device", "world_size"]
    deep = [[HOSTILE] * 9, {HOSTILE: HOSTILE}, None, 7]
    lists = dict.fromkeys(
        ["batch_plan", "memory_plan", "memory_notes", "effects", "hook_costs", "plugins", "changes"], deep
    )
    (run / "run.json").write_text(json.dumps({**dict.fromkeys(keys, HOSTILE), **lists, "versions": {HOSTILE: deep}}))
    (run / "config.yaml").write_text(f"? [{'[' * 200}\n")

    broken = make_run(tmp_path / "nested", num_steps=5)
    (broken / "run.json").write_text("[" * 100_000)

    async def use(client: TestClient[Any, Any]) -> None:
        listed, _ = (await (await client.get("/api/runs")).json())["runs"]
        answer = await client.get(f"/api/runs/{quote(listed['id'], safe='')}")
        assert answer.content_type == "application/json"
        assert (await answer.json())["header"]["message"] == HOSTILE

    ask(tmp_path, use)


def test_one_run_can_be_watched_and_an_absent_folder_waits_for_runs(runs: Path, tmp_path: Path) -> None:
    async def one(client: TestClient[Any, Any]) -> None:
        assert [run["id"] for run in (await (await client.get("/api/runs")).json())["runs"]] == ["001"]

    async def none(client: TestClient[Any, Any]) -> None:
        answer = await (await client.get("/api/runs")).json()
        assert (answer["exists"], answer["runs"]) == (False, [])

    ask(runs / "arithmetic/001", one)
    ask(tmp_path / "absent", none)


# ---- requests that are refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("127.0.0.1:6006", 200), ("localhost:6006", 200), ("[::1]:6006", 200), ("LOCALHOST", 200), ("10.1.2.3", 200)),
        *(
            ("evil.example", 403),
            ("evil.example:6006", 403),
            ("127.0.0.1.evil.example", 403),
            ("localhost.", 403),
            ("", 403),
        ),
    ],
)
def test_a_name_that_is_not_this_hosts_is_refused(runs: Path, host: str, status: int) -> None:
    async def use(client: TestClient[Any, Any]) -> None:
        for path in ("/", "/api/runs", "/static/plotly.js"):
            answer = await client.get(path, headers={"Host": host})
            assert answer.status == status
            assert "script-src 'self';" in answer.headers["Content-Security-Policy"]

    ask(runs, use)


def test_nothing_outside_the_folder_is_read_and_nothing_is_written(runs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_run(secret, num_steps=3)
    root = tmp_path / "root"
    inside = make_run(root / "inside", num_steps=3)
    (root / "link").symlink_to(secret)
    (inside / "config.yaml").unlink()
    (inside / "config.yaml").symlink_to(secret / "config.yaml")
    (inside / "metrics.jsonl").unlink()
    (inside / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    ids = ["../secret", "inside/../../secret", "link", str(secret), ".", "..", "inside/.", "inside\0"]

    async def use(client: TestClient[Any, Any]) -> None:
        assert [run["id"] for run in (await (await client.get("/api/runs")).json())["runs"]] == ["inside"]
        page = await (await client.get("/api/runs/inside")).json()
        assert (page["config"], page["sections"]) == ("", [])
        for run_id in ids:
            assert (await client.get(f"/api/runs/{quote(run_id, safe='')}")).status == 404
            assert (await client.get("/api/curves", params={"run": run_id, "metric": "loss"})).status == 404
        for path in (
            "/static/../server.py",
            "/static/%2e%2e/server.py",
            "/static//etc/passwd",
            "/inside/metrics.jsonl",
        ):
            assert (await client.get(path)).status == 404
        for method in ("POST", "PUT", "DELETE"):
            assert (await client.request(method, "/api/runs/inside")).status == 405

    before = sorted(os.walk(tmp_path))
    ask(root, use)
    assert sorted(os.walk(tmp_path)) == before


def test_every_file_of_the_page_is_served_and_brings_its_type(runs: Path) -> None:
    async def use(client: TestClient[Any, Any]) -> None:
        index = await (await client.get("/")).text()
        assert "<script src=" in index
        assert "onclick" not in index
        for name in (
            "watch.js",
            "runs.js",
            "compare.js",
            "run.js",
            "curves.js",
            "dom.js",
            "api.js",
            "charts.js",
            "samples.js",
        ):
            answer = await client.get(f"/static/{name}")
            assert (answer.status, answer.content_type) == (200, "text/javascript")
            again = await client.get(f"/static/{name}", headers={"If-None-Match": answer.headers["ETag"]})
            assert again.status == 304

    ask(runs, use)


def test_a_port_that_is_taken_and_a_file_are_refused_by_name(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr("aiohttp.web.run_app", lambda *_, **__: pytest.fail("it was served"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["watch", str(runs), "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is taken" in (shown := capsys.readouterr().err)
    assert "--port 0" in shown
    assert main(["watch", str(runs / "bare/metrics.jsonl")]) == 2
    assert "is a file" in capsys.readouterr().err
    for beyond in (-1, 65536):  # whose last 16 bits the system would take for another port
        assert main(["watch", str(runs), "--port", str(beyond)]) == 2
        assert f"--port {beyond}: give a port from 1 to 65535, or 0" in capsys.readouterr().err


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_address_is_printed_with_a_warning_where_others_reach_it(
    tmp_path: Path, host: str, warns: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("aiohttp.web.run_app", lambda app, sock, **_: served.append(sock))
    assert main(["watch", str(tmp_path / "none"), "--host", host, "--port", "0"]) == 0
    (socket,) = served
    shown = capsys.readouterr().out
    assert f"http://{host}:{socket.getsockname()[1]}/" in shown
    assert "does not exist yet" in shown
    assert ("no password" in " ".join(shown.split())) == warns
    socket.close()
