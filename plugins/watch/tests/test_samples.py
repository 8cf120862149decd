"""JSON of samples, groups and tokens, over a real server: what it finds, and that no file can make it fail."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.test_utils import TestClient, TestServer
from report_runs import write_metrics
from rlplug_watch.page import sample_index
from rlplug_watch.page.api import WatchedRuns
from rlplug_watch.page.folders import Runs
from rlplug_watch.page.sample_index import SampleFilter, SampleIndex, search
from rlplug_watch.page.samples_api import SamplePages
from rlplug_watch.page.server import make_app
from rlplug_watch.page.token_view import texts
from rlplug_watch.report.page import write_report
from sampled_runs import HOSTILE, line, write_run

RUN = f"/api/runs/{quote('a/001', safe='')}"
Get = Callable[[str], tuple[int, Any]]


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Return status and content of an address; the server begins anew for each."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "a" / "001")
    (root / "b").mkdir()
    (root / "b" / "metrics.jsonl").write_text("")
    (root / "c").mkdir()
    (root / "c" / "run.json").write_text("{}")
    (root / "c" / "samples.jsonl").symlink_to("/etc/passwd")
    (root / "c" / "tokens").symlink_to(tmp_path_factory.mktemp("elsewhere"))

    async def ask(address: str) -> tuple[int, Any]:
        async with TestClient(TestServer(make_app(root))) as client, client.get(address) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.status == 200 else text

    return lambda address: asyncio.run(ask(address))


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("phase=validate", [(1, None)]),
        ("phase=train&first_step=3&sort=-reward", [(3, 3), (3, 2), (3, 1), (3, 0)]),
        ("reward_min=0.5&last_step=2&sort=oldest", [(1, 3), (2, 2), (2, 3)]),
        ("errors=1", [(1, 2)]),
        ("tokens=1&first_step=2&last_step=2&sort=-advantage&limit=2&start=1", [(2, 3), (2, 2)]),
        ("query=ALERT(1)", [(1, 1)]),
        ("query=%5Cx1b", []),
        ("query=%26amp%3B%1B%5B31M", [(1, 1)]),  # JSON writes a part of it otherwise
        ("query=%C3%89&phase=train", [(1, 1)]),
        ("query=3+%2B+1&sort=oldest", [(3, 1)]),
    ],
)
def test_samples_are_filtered_sorted_and_searched(get: Get, query: str, found: list[tuple[int, int | None]]) -> None:
    status, page = get(f"{RUN}/samples?{query}")
    assert status == 200
    assert [(row["step"], row["index"]) for row in page["rows"]] == found
    assert page["num_samples"] == 14
    assert page["num_unreadable"] == 8


def test_a_hostile_sample_arrives_as_it_was_written_and_short(get: Get) -> None:
    _, page = get(f"{RUN}/samples?phase=train&last_step=1&sort=oldest")
    by_index = {row["index"]: row for row in page["rows"]}
    assert by_index[1]["completion"] == by_index[1]["prompt"] == by_index[1]["prompt_uid"] == HOSTILE
    assert by_index[2]["errors"] == {HOSTILE: HOSTILE}
    assert by_index[3]["completion"] == "x" * 400
    _, group = get(f"{RUN}/group?step=1&phase=train&group=0")
    assert [sample["index"] for sample in group["samples"]] == [3, 1, 0, 2]
    assert len(group["samples"][0]["completion"]) == 200_000
    assert json.loads(group["samples"][1]["answer"]) == {"a": HOSTILE}
    assert group["samples"][1]["tokens"]["num_clipped"] == 0
    assert group["samples"][2]["tokens"] == {"num_clipped": 3, "advantage": -1.0}


def test_a_group_of_a_former_version_goes_by_its_prompt(get: Get) -> None:
    _, group = get(f"{RUN}/group?step=1&phase=validate&uid=train.jsonl%3A1")
    assert [sample["tokens"] for sample in group["samples"]] == [None]


def test_tokens_of_a_completion(get: Get) -> None:
    _, page = get(f"{RUN}/tokens/2/0/3")
    assert page["texts"][:4] == ["It", "", "\u20ac <script>", "\\xff\n"]
    assert page["sample"]["completion"] == "It is 5"
    assert [other["index"] for other in page["siblings"]] == [3, 2, 1, 0]
    columns = page["columns"]
    assert columns["flags"] == [3, 3, 0, 3, 3, 1]
    assert columns["advantages"] == [1.0, 1.0, None, 1.0, 1.0, None]
    assert columns["log_ratio"][0] == pytest.approx(-0.3 + 18 * 0.6 / 23, abs=2e-4)
    assert columns["clipped"] == [0, 0, 0, 1, 1, 0]


@pytest.mark.parametrize(
    ("address", "status", "message"),
    [
        ("/api/runs/none/samples", 404, "there is no run 'none'"),
        ("/api/runs/..%2F..%2Fetc/samples", 404, "there is no run"),
        (f"{RUN}/samples?sort=size", 400, "give one of newest, oldest"),
        (f"{RUN}/samples?first_step=-1", 400, "first_step must be a whole number"),
        (f"{RUN}/samples?reward_min=nan", 400, "reward_min must be a number"),
        (f"{RUN}/samples?start=1e99", 400, "start must be a whole number"),
        (f"{RUN}/group?step=7&group=0", 404, "no sample of this group is logged in step 7"),
        (f"{RUN}/tokens/9/0/0", 404, "3 steps from 1 to 3 have some"),
        (f"{RUN}/tokens/1/0/7", 404, "run.token_samples_per_step"),
        (f"{RUN}/tokens/1/0/..%2F", 404, "index must be a whole number"),
        ("/api/runs/b/tokens/1/0/0", 404, "There is no token log"),
        ("/api/runs/c/tokens/1/0/0", 404, "There is no token log"),
    ],
)
def test_what_is_not_there_is_said(get: Get, address: str, status: int, message: str) -> None:
    found, text = get(address)
    assert (found, message in text) == (status, True), text


@pytest.mark.parametrize("run", ["b", "c"])
def test_a_run_without_samples_and_a_link_out_of_the_root_have_none(get: Get, run: str) -> None:
    assert get(f"/api/runs/{run}/samples")[1] == {
        "problem": "There is no samples.jsonl: the run has logged no samples.",
        "rows": [],
    }


def test_an_index_follows_a_file_that_grows_and_begins_again_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [json.dumps(line(step, 0)) + "\n" for step in range(1, 6)]
    path.write_text("".join(rows[:3]) + rows[3][:20])
    index = SampleIndex(path)
    index.grow(1)
    assert index.rows["step"].tolist() == [1, 2, 3]
    assert index.is_complete  # as far as lines are whole
    with path.open("a") as file:
        file.write(rows[3][20:] + rows[4])
    index.grow(1)
    assert index.rows["step"].tolist() == [1, 2, 3, 4, 5]
    new = tmp_path / "new"
    new.write_text(rows[0] + json.dumps(line(7, 0)) + "\n" + "".join(rows))
    new.replace(path)
    index.grow(1)
    assert index.rows["step"].tolist() == [1, 7, 1, 2, 3, 4, 5]


def test_requests_at_once_share_an_index(tmp_path: Path) -> None:
    """Alone catches two threads of which one replaces what the other has read of a gigabyte of samples."""
    write_run(tmp_path / "a")
    runs, pages = Runs(tmp_path), SamplePages()
    first = pages.of_run(runs, "a")
    with ThreadPoolExecutor(8) as pool:
        assert all(each is first for each in pool.map(lambda _: pages.of_run(runs, "a"), range(2000)))
    watched = WatchedRuns(runs)
    run = watched.get("a")
    with ThreadPoolExecutor(8) as pool:
        assert all(each is run for each in pool.map(lambda _: watched.get("a"), range(2000)))


def test_a_huge_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_index, "MAX_LINE", 1000)
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps(line(1, 0, prompt="x" * 10_000)) + "\n" + json.dumps(line(2, 0)) + "\n")
    index = SampleIndex(path)
    index.grow(1)
    assert index.rows["step"].tolist() == [2]
    assert index.num_unreadable == 1


def test_a_search_without_time_left_says_where_it_ended_and_goes_on_there(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    count = 3 * sample_index.AT_ONCE
    path.write_text("".join(json.dumps(line(step, 0)) + "\n" for step in range(1, count + 1)))
    index = SampleIndex(path)
    index.grow(10)
    found, start, searched = [], 0, 0
    for _ in range(3):
        page = search(index, SampleFilter(text=f"is {count - 70} + 0"), "newest", start, 10, seconds=0)
        found += [sample.step for _, sample in page.samples]
        searched, start = searched + page.num_searched, page.next
    assert found == [count - 70]
    assert searched == start == page.num_candidates == count


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ([b"\xf0\x9f", b"\x98", b"\x80!"], ["", "", "\U0001f600!"]),
        ([b"a\xff", b"\xe2\x82"], ["a\\xff", "\\xe2\\x82"]),
        ([], []),
    ],
)
def test_a_character_is_shown_where_its_last_byte_is(pieces: list[bytes], found: list[str]) -> None:
    assert texts(pieces) == found


TURNS = [{"role": "policy", "text": "3"}, {"role": "environment", "text": HOSTILE}, {"role": "policy", "text": "4"}]


def test_a_group_tells_its_turns_apart(tmp_path: Path) -> None:
    """Catches a page that shows what the environment answered as the policy's words."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    (folder / "samples.jsonl").write_text(json.dumps(line(1, 0, turns=TURNS)) + "\n" + json.dumps(line(1, 1)) + "\n")

    async def ask() -> Any:
        async with TestClient(TestServer(make_app(tmp_path))) as client:
            paths = ("/api/runs/a/group?step=1&group=0", "/api/runs/a/samples")
            return [await (await client.get(path)).json() for path in paths]

    group, samples_page = asyncio.run(ask())
    samples = {sample["index"]: sample for sample in group["samples"]}
    (listed,) = (row for row in samples_page["rows"] if row["index"] == 0)
    assert listed["completion"] == f"policy: 3\nenvironment: {HOSTILE}\npolicy: 4"
    assert [turn["role"] for turn in samples[0]["turns"]] == ["policy", "environment", "policy"]
    assert samples[0]["turns"][2]["text"] == "4"
    assert samples[1]["turns"] == []


def test_a_report_tells_turns_apart(tmp_path: Path) -> None:
    """Catches a report whose cards run the turns of a trajectory together."""
    write_metrics(tmp_path, [{"step": 1, "reward/mean": 0.5}])
    (tmp_path / "samples.jsonl").write_text(json.dumps(line(1, 0, turns=TURNS)) + "\n")
    page = write_report(tmp_path).read_text()
    labels = re.findall('<div class="label[^"]*">([^<]*)</div>', page)
    assert labels[:4] == ["Prompt", "Policy", "Environment", "Policy"]
    assert "<script>document.title" not in page
