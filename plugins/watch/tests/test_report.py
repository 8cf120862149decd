"""The page of a run folder: what it shows, what it escapes, and what it tolerates."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import RUN, lines_of, make_run, metric_rows, sample_rows, write_metrics, write_samples
from rlplug_watch.report.contents import build_contents
from rlplug_watch.report.page import write_report
from rlplug_watch.report.run_data import read_run
from rlplug_watch.report.series import Series
from rlplug_watch.report.summary import duration, hook_costs

from rlplug.cli.main import main
from rlplug.errors import ConfigError

pytest.importorskip("plotly")

HOSTILE = "</pre></script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>"


class _Page(HTMLParser):
    """What a browser would make of a page: its elements, its text, and the addresses that it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open = ""
        self.feed(page)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.text += data


def read_page(run_dir: Path) -> _Page:
    return _Page(write_report(run_dir).read_text(encoding="utf-8"))


def figures_of(page: _Page) -> list[dict[str, Any]]:
    specs: list[dict[str, Any]] = json.loads(page.scripts[0], parse_constant=lambda text: pytest.fail(text))
    return specs


def test_the_pages_of_a_folder_share_one_script(tmp_path: Path) -> None:
    """Catches a page that does not find the script, one that is as large as the script, and a script that is torn."""
    pages = [write_report(make_run(tmp_path / name, num_steps=12)) for name in ("001", "002")]
    (script,) = tmp_path.glob("*.js")
    source = [value for name, value in _Page(pages[0].read_text(encoding="utf-8")).attributes if name == "src"]
    assert (pages[0].parent / source[0]).resolve() == script
    assert max(page.stat().st_size for page in pages) < 300_000
    whole = script.read_text()
    script.write_text(whole[:1000])
    write_report(pages[0].parent)
    assert script.read_text() == whole


def test_the_single_file_loads_nothing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "arithmetic")
    before = {path.name for path in run_dir.iterdir()}
    path = write_report(run_dir, is_single_file=True)
    page = _Page(path.read_text(encoding="utf-8"))

    assert path == run_dir / "report.html"
    assert {file.name for file in run_dir.iterdir()} - before == {"report.html"}
    assert [(name, value) for name, value in page.attributes if name in ("src", "href", "srcset", "action")] == []
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    css = path.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in css
    assert "@import" not in css
    assert len(page.scripts) == 3
    assert page.scripts[1].count("plotly.js v") == 1
    assert ("content", "width=device-width, initial-scale=1") in page.attributes
    policy = next(value for name, value in page.attributes if name == "content" and value and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "http" not in policy
    # plotly.js is 4.8 MB of it.
    assert path.stat().st_size - len(page.scripts[1]) < 300_000


def test_the_report_shows_the_numbers_of_the_run(tmp_path: Path) -> None:
    page = read_page(make_run(tmp_path / "arithmetic"))
    rewards = [row["reward/mean"] for row in metric_rows(160)]

    assert f"{sum(rewards[:5]) / 5:.3f} \u2192 {sum(rewards[-5:]) / 5:.3f}" in page.text
    assert "Steps 160 step 0 to 159" in page.text
    assert f"Time in steps {duration(sum(row['time/step'] for row in metric_rows(160)))}" in page.text
    first, last = metric_rows(160)[0]["validate/pass@1"], metric_rows(160)[-1]["validate/pass@1"]
    assert f"{100 * first:.1f}% \u2192 {100 * last:.1f}%" in page.text
    for text in ("arithmetic", "finished", "2 \u00d7 NVIDIA H200", "mini_batch_size", "rlplug-rollout-vllm", "2.12.0"):
        assert text in page.text
    for text in (
        "kl_coefficient: 0.001",
        "blocked: by name",
        "no verdict within 5 s",
        "Liger replaced 57 modules",
        "data answers: 3f2a",
    ):
        assert text in page.text
    assert "was not recorded" not in page.text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run<b>", num_steps=12)
    hostile = sample_rows(12)
    for row in hostile:
        row |= {"prompt": HOSTILE, "completion": HOSTILE * 20, "answer": HOSTILE, "prompt_uid": HOSTILE}
        row |= {"finish_reason": HOSTILE, "phase": HOSTILE, "rewards": {HOSTILE: {"error": HOSTILE}}}
    write_samples(run_dir, hostile)
    write_metrics(run_dir, [row | {f"reward/{HOSTILE}": 1.0, f"time/{HOSTILE}": 1.0} for row in metric_rows(12)])
    (run_dir / "config.yaml").write_text(HOSTILE)
    run = RUN | {"status": HOSTILE, "message": HOSTILE, "device": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    run |= {"batch_plan": [[HOSTILE] * 3], "plugins": [{"name": HOSTILE, "state": HOSTILE}], "effects": [HOSTILE]}
    run |= {"changes": [{"since": HOSTILE, "effect": HOSTILE, "what": HOSTILE}]}
    (run_dir / "run.json").write_text(json.dumps(run))
    page = read_page(run_dir)

    assert len(page.scripts) == 3
    assert not any("alert(1)" in script for script in page.scripts[1:])
    assert "img" not in page.tags
    assert "onerror" not in dict(page.attributes)
    assert page.text.count(HOSTILE) > 20
    names = [trace["name"] for figure in figures_of(page) for trace in figure["data"]]
    assert any("&lt;script&gt;" in name for name in names)
    assert not any("<" in name for name in names)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_run_of_a_few_steps_has_a_report(tmp_path: Path, num_steps: int) -> None:
    page = read_page(make_run(tmp_path, num_steps))
    figures = figures_of(page)

    assert f" Steps {num_steps} " in page.text
    assert len(figures) == 13
    # A line through one point is invisible: it has to be marked.
    assert all("markers" in t.get("mode", "") or t["type"] == "bar" for t in figures[0]["data"] if num_steps == 1)


def test_a_folder_with_metrics_alone_has_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": step, "reward/mean": step / 10} for step in range(5)])
    page = read_page(tmp_path)

    assert len(figures_of(page)) == 1
    for text in ("No samples.jsonl", "No run.json", "No config.yaml", "KL to the reference policy (policy/kl) was not"):
        assert text in page.text
    assert "unknown" in page.text


def test_the_summary_of_a_profile_is_in_the_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    assert "Profiled steps" not in read_page(run_dir).text
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "summary.txt").write_text("attention<half>  41.5%")
    text = read_page(run_dir).text
    assert "Profiled steps" in text
    assert "attention<half> 41.5%" in text


def test_a_run_without_finished_steps_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "samples.jsonl").write_text("")
    page = read_page(tmp_path)

    assert "No step has ended" in page.text
    assert "samples.jsonl holds no samples" in page.text


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    """Catches a report that needs a row: the first may take an hour."""
    (tmp_path / "run.json").write_text(json.dumps(RUN | {"status": "running", "finished": None}))
    assert "No step has ended" in read_page(tmp_path).text
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No step has ended" in read_page(tmp_path).text


def test_cells_that_are_no_numbers_are_left_out_and_counted(tmp_path: Path) -> None:
    table = (
        "step,reward/mean,loss,policy/grad_norm,policy/entropy\n"
        "0,0.5,nan,1e308,\n1,inf,0.1,1.7e308,\n2,,0.2,-1.7e308,\n,0.9,,,\n3,0.7,-inf,1\n"
    )
    (tmp_path / "metrics.jsonl").write_text(lines_of(table))
    metrics = read_run(tmp_path).metrics
    page = read_page(tmp_path)

    assert metrics.series("reward/mean") == Series((0, 3), (0.5, 0.7))
    assert metrics.num_not_finite == {"reward/mean": 1, "loss": 2}
    assert "loss (2 not finite)" in page.text
    assert "1 lines of metrics.jsonl have no step" in page.text
    assert len(figures_of(page)) == 2


def test_a_samples_file_that_was_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=20)
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write('[1, 2]\n{"step": 19, "completion": "half a pair: \\ud83d", "reward": 9}\n{"step": 19, "compl')
    page = read_page(run_dir)

    assert "2 lines of samples.jsonl are not samples" in page.text
    assert "half a pair: ?" in page.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "run.json is not JSON"),
        ("[]", "unknown"),
        ('{"batch_plan": 3, "plugins": [4], "versions": []}', "unknown"),
    ],
)
def test_a_broken_run_file_does_not_hide_the_metrics(tmp_path: Path, text: str, said: str) -> None:
    run_dir = make_run(tmp_path, num_steps=6)
    (run_dir / "run.json").write_text(text)
    page = read_page(run_dir)

    assert said in page.text
    assert len(figures_of(page)) == 13


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}.*has no metrics.jsonl.*samples.jsonl"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere.*is not a folder"):
        write_report(tmp_path / "nowhere")


def test_without_plotly_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=re.escape("pip install rlplug-watch")):
        write_report(make_run(tmp_path, num_steps=2))


def test_a_long_run_stays_light_and_keeps_its_spikes(tmp_path: Path) -> None:
    rows = [{"step": s, "reward/mean": s % 7, "policy/grad_norm": 1.0, "time/update": 2.0} for s in range(30_000)]
    rows[12_345]["policy/grad_norm"] = 50.0
    write_metrics(tmp_path, rows)
    page = read_page(tmp_path)
    traces = [trace for figure in figures_of(page) for trace in figure["data"]]

    assert max(len(trace["x"]) for trace in traces) <= 2000
    assert any(50.0 in trace["y"] for trace in traces)
    assert len(page.scripts[0]) < 500_000


@pytest.mark.parametrize("recorded", [None, 5, ["text"], [{"plugin": "x"}], [{"plugin": "x", "seconds": "many"}]])
def test_costs_of_another_form_are_left_out(recorded):
    assert hook_costs(recorded, 10.0) == []


def test_times_of_a_resumed_run_are_of_all_its_steps_or_of_its_last_process(tmp_path):
    """It catches the time of one process beside all steps, and a share of all steps for the hooks of one process."""
    cost = {"plugin": "x", "hook": "h", "phase": "update", "calls": 10, "seconds": 42.0}
    times = {"started": "2026-11-20T21:00:00+00:00", "finished": "2026-11-20T21:07:00+00:00"}
    run_dir = make_run(tmp_path / "run", 20)
    write_metrics(run_dir, [{"step": step, "reward/mean": 0.5, "time/step": 360.0} for step in range(1, 21)])
    (run_dir / "run.json").write_text(json.dumps(RUN | times | {"hook_costs": [cost]}))
    contents = build_contents(read_run(run_dir))
    assert [(tile.label, tile.value) for tile in contents.tiles if "ime" in tile.label] == [
        ("Time in steps", "2 h 0 min")
    ]
    assert contents.hook_costs[0].share == "10.0000%"


def test_the_page_shows_what_plugins_cost(tmp_path):
    cost = {"plugin": HOSTILE, "hook": "prepare_batch", "phase": "advantages", "calls": 40, "seconds": 0.5}
    run_dir = make_run(tmp_path / "run", 20)
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(record | {"hook_costs": [cost]}))
    page = read_page(run_dir)
    assert "Cost by plugin" in page.text
    assert "prepare_batchadvantages40 0.5000" in page.text
    assert page.tags.count("img") == 0
    assert hook_costs([cost], 100.0)[0].share == "0.5000%"


def test_the_metrics_as_a_spreadsheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch cells under another name, a step that a late validation makes twice, and values that lose digits."""
    rows = [{"step": 1, "b": 0.1 + 0.2}, {"step": 2, "a": "NaN"}, {"step": 1, "validate/x": 1}]
    write_metrics(tmp_path, rows)
    assert main(["report", str(tmp_path), "--csv", str(tmp_path / "m.csv")]) == 0
    text = (tmp_path / "m.csv").read_text()
    assert text.splitlines() == ["step,a,b,validate/x", "1,,0.30000000000000004,1.0", "2,nan,,"]
    assert capsys.readouterr().out == f"{tmp_path / 'm.csv'}\n"
    assert not (tmp_path / "report.html").exists()
    assert main(["report", str(tmp_path / "none"), "--csv", str(tmp_path / "m.csv")]) == 2
    assert main(["report", str(tmp_path), "--csv", str(tmp_path / "none/m.csv")]) == 1
