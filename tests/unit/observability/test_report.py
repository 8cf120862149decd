"""The report of a run folder: what it shows, what it escapes, and what it tolerates."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplug.errors import ConfigError
from rlplug.observability.phase_timer import PHASES
from rlplug.observability.report import figures, write_report
from rlplug.observability.report.figures import build_figures
from rlplug.observability.report.run_data import Metrics, SampleRecord, read_run
from rlplug.observability.report.series import Series, bucket_means, keep_extremes, smooth
from rlplug.observability.report.summary import best_and_worst, duration, number

go = pytest.importorskip("plotly.graph_objects")

HOSTILE = "</pre></script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>"

RUN = {
    "status": "finished",
    "started": "2026-11-20T21:04:11+00:00",
    "finished": "2026-11-20T21:41:53+00:00",
    "versions": {"rlplug": "0.1.0", "torch": "2.12.0", "lightning": "2.6.1", "transformers": "5.9.0", "vllm": "0.22.0"},
    "plugins": [
        {"name": "algos", "distribution": "rlplug-algos", "version": "0.1.0", "state": "loaded"},
        {"name": "vllm", "distribution": "rlplug-rollout-vllm", "version": "0.1.0", "state": "loaded"},
        {
            "name": "optims",
            "distribution": "rlplug-optims",
            "version": "0.1.0",
            "state": "blocked",
            "reason": "by name",
        },
    ],
    "device": "NVIDIA H200",
    "world_size": 2,
    "batch_plan": [
        ["prompts_per_step", "32", "prompts drawn in each step, over all ranks"],
        ["group_size", "8", "completions of each prompt"],
        ["mini_batch_size", "128 sequences", "each optimizer step sees this many: 2 optimizer steps a step"],
        ["max_tokens_per_gpu", "16,384", "a micro-batch is packed up to this; about 5 micro-batches in a mini-batch"],
    ],
    "effects": ["Liger replaced 57 modules", "forward prefetch set on 28 modules"],
    "message": None,
}

CONFIG = """\
seed_everything: 7
model:
  class_path: rlplug.module.RLModule
  init_args:
    policy: {path: Qwen/Qwen3-0.6B, dtype: bfloat16}
    algorithm: {class_path: GRPO, init_args: {clip_low: 0.2, clip_high: 0.28, kl_coefficient: 0.001}}
    rollout: {class_path: VLLMRollout, init_args: {gpu_memory_utilization: 0.55}}
    rewards:
      - {class_path: MathVerify, init_args: {weight: 1.0}}
      - {class_path: RegexFormat, init_args: {weight: 0.1}}
trainer: {max_steps: 160, precision: bf16-true}
"""


def metric_rows(num_steps: int) -> list[dict[str, float]]:
    """Return the metrics of a run that learns arithmetic: a noisy logistic curve, shorter completions, less entropy."""
    noise = random.Random(7)
    rows: list[dict[str, float]] = []
    for step in range(num_steps):
        learned = 1 / (1 + math.exp(-(step - num_steps * 0.38) / (num_steps * 0.11)))
        solved = min(0.98, max(0.0, 0.09 + 0.72 * learned + noise.gauss(0, 0.045)))
        tagged = min(1.0, 0.15 + 0.84 * min(1.0, step / (num_steps * 0.3)) + noise.gauss(0, 0.012))
        length = 212 - 74 * learned + noise.gauss(0, 7)
        mismatch = 0.0031 * math.exp(noise.gauss(0, 0.18)) * (1 + 0.5 * learned)
        times = {
            "prompts": 0.02,
            "rollout": 4.1 + length / 40 + abs(noise.gauss(0, 0.35)),
            "rewards": 0.35 + abs(noise.gauss(0, 0.12)),
            "filter": 0.01,
            "logprobs": 1.05 + noise.gauss(0, 0.04),
            "advantages": 0.02,
            "update": 3.6 + length / 90 + noise.gauss(0, 0.1),
            "publish": 0.62 + abs(noise.gauss(0, 0.05)),
        }
        whole = sum(times.values()) + 0.4
        row = {
            "step": step,
            "reward/mean": solved + 0.1 * tagged,
            "reward/std": math.sqrt(max(0.0, solved * (1 - solved))),
            "reward/math": solved,
            "reward/format": tagged,
            "reward/error_share": 0.004 if step % 23 == 7 else 0.0,
            "completion/length_mean": length,
            "completion/length_max": min(384.0, length * 1.9 + abs(noise.gauss(0, 30))),
            "completion/truncated_share": max(0.0, 0.11 - 0.1 * learned + noise.gauss(0, 0.008)),
            "throughput/tokens_per_s": 256 * length / whole,
            "mismatch/mean": mismatch,
            "mismatch/max": mismatch * 90 * math.exp(noise.gauss(0, 0.5)),
            "policy/kl": 0.021 * learned * (1 + noise.gauss(0, 0.08)),
            "policy/entropy": 0.46 - 0.29 * learned + noise.gauss(0, 0.012),
            "policy/clip_fraction_low": max(0.0, 0.006 + 0.004 * learned + noise.gauss(0, 0.0012)),
            "policy/clip_fraction_high": max(0.0, 0.004 + 0.004 * learned + noise.gauss(0, 0.0012)),
            "advantages/degenerate_groups": max(0.0, 0.3 - 0.1 * learned + noise.gauss(0, 0.02)),
            "policy/grad_norm": 0.42 - 0.2 * learned + abs(noise.gauss(0, 0.05)),
            "policy/lr": 1e-6 * min(1.0, (step + 1) / 10),
            "loss": noise.gauss(0, 0.004),
            **{f"time/{phase}": seconds for phase, seconds in times.items()},
            "time/step": whole,
            "memory/rollout": 71.4,
            "memory/logprobs": 38.2 + noise.gauss(0, 0.3),
            "memory/update": 58.9 + noise.gauss(0, 0.6),
            "memory/publish": 33.0,
        }
        if step % 20 == 0 or step == num_steps - 1:
            row |= {"validate/reward_mean": solved - 0.02, "validate/pass@1": solved - 0.03}
            row |= {"validate/pass@4": min(0.99, solved + 0.13)}
        rows.append(row)
    return rows


def sample_rows(num_steps: int) -> list[dict[str, Any]]:
    """Return a few samples of every fifth step: additions, some wrong, some cut off, one whose reward failed."""
    noise = random.Random(11)
    rows: list[dict[str, Any]] = []
    for step in range(0, num_steps, 5):
        for index in range(6):
            a, b = noise.randint(12, 980), noise.randint(12, 980)
            is_right, is_cut = noise.random() < 0.15 + 0.75 * step / num_steps, index == 5
            thought = f"{a} + {b}: first the tens, then the ones. " * (12 if is_cut else 2)
            text = f"<think>\n{thought}\n</think>\n\n" + f"The sum is \\boxed{{{a + b if is_right else a + b + 10}}}."
            value = float(is_right and not is_cut)
            failed = index == 2 and step % 40 == 35
            rows.append(
                {
                    "step": step,
                    "phase": "validate" if step % 20 == 0 and index == 0 else "train",
                    "prompt_uid": f"train.jsonl:{noise.randint(0, 900)}",
                    "prompt": f"<|im_start|>user\nWhat is {a} + {b}? Put the answer in \\boxed{{}}.<|im_end|>\n",
                    "completion": thought * 3 if is_cut else text,
                    "answer": a + b,
                    "reward": None if failed else value + 0.1 * (not is_cut),
                    "rewards": {
                        "math": {"error": "TimeoutError: no verdict within 5 s"} if failed else value,
                        "format": float(not is_cut),
                    },
                    "finish_reason": "length" if is_cut else "stop",
                    "num_tokens": 384 if is_cut else noise.randint(70, 160),
                }
            )
    return rows


def write_metrics(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (run_dir / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def write_samples(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(run_dir: Path, num_steps: int = 160) -> Path:
    """Write a complete run folder and return it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_metrics(run_dir, metric_rows(num_steps))
    write_samples(run_dir, sample_rows(num_steps))
    (run_dir / "run.json").write_text(json.dumps(RUN))
    (run_dir / "config.yaml").write_text(CONFIG)
    return run_dir


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


def test_the_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "arithmetic")
    before = {path.name for path in run_dir.iterdir()}
    path = write_report(run_dir)
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
    assert "Wall time 37 min 42 s" in page.text
    first, last = metric_rows(160)[0]["validate/pass@1"], metric_rows(160)[-1]["validate/pass@1"]
    assert f"{100 * first:.1f}% \u2192 {100 * last:.1f}%" in page.text
    for text in ("arithmetic", "finished", "2 \u00d7 NVIDIA H200", "mini_batch_size", "rlplug-rollout-vllm", "2.12.0"):
        assert text in page.text
    for text in ("kl_coefficient: 0.001", "blocked: by name", "no verdict within 5 s", "Liger replaced 57 modules"):
        assert text in page.text
    assert "was not recorded" not in page.text


def test_every_figure_is_valid_plotly_and_holds_the_metrics(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    figures, absent = build_figures(read_run(run_dir).metrics)
    by_title = {figure.title: figure for figure in figures}

    assert absent == []
    for figure in figures:
        # Plotly's own schema, which rejects an unknown property and a bad value.
        go.Figure({"data": figure.spec["data"], "layout": figure.spec["layout"]})
        covered = sorted(index for entry in figure.legend for index in entry.traces)
        assert covered == list(range(len(figure.traces)))
    raw = next(trace for trace in by_title["Reward"].traces if trace["name"] == "training mean")
    assert raw["y"] == pytest.approx([row["reward/mean"] for row in metric_rows(160)], rel=1e-4)
    validation = next(trace for trace in by_title["Reward"].traces if trace["name"] == "validation pass@1")
    assert validation["x"] == [0, 20, 40, 60, 80, 100, 120, 140, 159]
    assert by_title["Engine and trainer mismatch"].spec["layout"]["yaxis"]["type"] == "log"
    assert "type" not in by_title["Gradient norm"].spec["layout"]["yaxis"]
    stack = by_title["Where the time goes"].traces
    names = [trace["name"] for trace in stack]
    assert names[:3] == ["prompts", "rollout", "rewards"]
    assert names[-1] == "outside the phases"
    assert sum(trace["y"][7] for trace in stack) == pytest.approx(metric_rows(160)[7]["time/step"], rel=1e-3)


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
    (tmp_path / "metrics.csv").write_text("step,reward/mean\n")
    (tmp_path / "samples.jsonl").write_text("")
    page = read_page(tmp_path)

    assert "No step has ended" in page.text
    assert "samples.jsonl holds no samples" in page.text


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    """Catches a report that needs a row: the first may take an hour."""
    (tmp_path / "run.json").write_text(json.dumps(RUN | {"status": "running", "finished": None}))
    assert "No step has ended" in read_page(tmp_path).text
    (tmp_path / "metrics.csv").write_text("")
    assert "No step has ended" in read_page(tmp_path).text


COLOUR = re.compile(r"--([a-z]+): #([0-9a-f]{6})")


def test_no_two_phases_look_alike() -> None:
    """Catches a phase that is added and takes another's colour, in either theme."""
    css = (Path(figures.__file__).parent / "report.css").read_text()
    light, dark = css.split("prefers-color-scheme: dark", 1)
    phases = {f"time/{phase}": (1.0,) for phase in (*PHASES, "validate", "checkpoint", "step")}
    (figure,) = [f for f in build_figures(Metrics((1,), phases))[0] if f.title == "Where the time goes"]
    hues = [entry.hue for entry in figure.legend]
    assert len(hues) == len(PHASES) + 2
    for theme in (light, dark.split("}", 1)[0]):
        found = {name: bytes.fromhex(value) for name, value in COLOUR.findall(theme)}
        for first, second in itertools.combinations(hues, 2):
            assert math.dist(found[first], found[second]) > 40, (first, second)


def test_the_chart_of_memory_has_few_lines_that_differ() -> None:
    """Catches ten lines on top of each other, and an axis on which lines that are close are one."""
    names = (*PHASES, "validate", "checkpoint")
    columns = {f"memory/{phase}": (0.40 + 0.01 * index, 0.42) for index, phase in enumerate(names)}
    (figure,) = build_figures(Metrics((1, 2), columns))[0]
    assert [entry.label for entry in figure.legend] == ["rollout", "logprobs", "update", "highest of the other phases"]
    assert figure.traces[-1]["y"] == [0.49, 0.42]
    assert "rangemode" not in figure.y_axis


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=2, max_size=60))
def test_the_band_stays_within_the_rewards(steps: list[list[float]]) -> None:
    """Catches a band above the best or below the worst reward, which nothing can reach."""
    summaries = {"mean": fmean, "std": pstdev, "min": min, "max": max}
    columns = {f"reward/{name}": tuple(function(row) for row in steps) for name, function in summaries.items()}
    (figure,) = build_figures(Metrics(tuple(range(len(steps))), columns))[0]
    low, high = figure.traces[:2]
    assert min(low["y"]) >= min(map(min, steps)) - 1e-3
    assert max(high["y"]) <= max(map(max, steps)) + 1e-3
    assert all(below <= above + 1e-3 for below, above in zip(low["y"], high["y"], strict=True))


def test_cells_that_are_no_numbers_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(
        "step,reward/mean,loss,policy/grad_norm,policy/entropy\n"
        "0,0.5,nan,1e308,\n1,inf,0.1,1.7e308,\n2,,0.2,-1.7e308,\n,0.9,,,\n3,0.7,-inf,1\n"
    )
    metrics = read_run(tmp_path).metrics
    page = read_page(tmp_path)

    assert metrics.series("reward/mean") == Series((0, 3), (0.5, 0.7))
    assert metrics.num_not_finite == {"reward/mean": 1, "loss": 2}
    assert "loss (2 not finite)" in page.text
    assert "1 rows of metrics.csv have no step" in page.text
    assert len(figures_of(page)) == 2


def test_the_last_row_of_a_step_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss,validate/pass@1\n1,5,0.5\n2,6,\n1,7,\n")
    metrics = read_run(tmp_path).metrics

    assert metrics.steps == (1, 2)
    assert metrics.columns == {"loss": (7.0, 6.0), "validate/pass@1": (0.5, None)}


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
    with pytest.raises(ConfigError, match=rf"{re.escape(str(tmp_path))}.*has no metrics.csv.*samples.jsonl"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere.*is not a folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "metrics.csv").write_text("steps,loss\n1,2\n")
    with pytest.raises(ConfigError, match=r"no column 'step'.*steps, loss"):
        write_report(tmp_path)


def test_without_plotly_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'rlplug[report]'")):
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


def test_smoothing_keeps_a_line_and_thinning_keeps_extremes_and_means() -> None:
    line = Series(tuple(range(5000)), tuple(2.0 * step for step in range(5000)))
    assert smooth(line).values[1000] == pytest.approx(2.0 * smooth(line).steps[1000], abs=4)
    wave = Series(tuple(range(10_000)), tuple(math.sin(step) for step in range(10_000)))
    thin = keep_extremes(wave, 100)
    assert len(thin) <= 100
    assert (min(thin.values), max(thin.values)) == (min(wave.values), max(wave.values))
    assert list(thin.steps) == sorted(thin.steps)
    assert sum(bucket_means(line, 100).values) / 100 == pytest.approx(sum(line.values) / 5000)
    huge = Series(tuple(range(30)), (1.7e308,) * 30)
    assert smooth(huge).values[15] == pytest.approx(1.7e308)


def _record(step: int, uid: str, reward: float | None) -> SampleRecord:
    return SampleRecord(step, "train", uid, "", "", "", reward, {}, "stop", 1)


def test_best_and_worst_share_no_sample_and_vary_the_prompts_among_ties() -> None:
    ones = [_record(step, uid, 1.0) for step, uid in ((9, "a"), (9, "a"), (8, "b"), (7, "c"))]
    rest = [_record(9, "d", 0.5), _record(9, "e", None), _record(3, "f", 0.0), _record(4, "g", 0.0)]
    best, worst = best_and_worst([*rest, *ones])

    assert [(sample.prompt_uid, sample.reward) for sample in best] == [("a", 1), ("b", 1), ("c", 1), ("a", 1)]
    assert [(sample.prompt_uid, sample.reward) for sample in worst] == [("g", 0), ("f", 0), ("d", 0.5)]
    assert best_and_worst([_record(1, "a", 0.0)]) == ([_record(1, "a", 0.0)], [])


def test_samples_come_from_the_last_quarter(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=100)
    assert {sample.step for sample in read_run(run_dir).samples.late} == {75, 80, 85, 90, 95}
    write_samples(run_dir, [row for row in sample_rows(100) if row["step"] <= 30])
    assert {sample.step for sample in read_run(run_dir).samples.late} == {30}


def test_numbers_and_durations_read_well() -> None:
    assert [number(value) for value in (0.71342, 1.0, 12840.2, 0.00412, 1.3e-5, 0.0, -25.25)] == [
        *("0.713", "1", "12,840", "0.00412", "1.3e-05", "0", "-25.2")
    ]
    assert [duration(seconds) for seconds in (0.8, 42, 245, 11_520, 400_000)] == [
        *("0.80 s", "42 s", "4 min 5 s", "3 h 12 min", "4 d 15 h")
    ]


def test_a_critic_has_figures_and_nothing_of_it_is_missed_without_one() -> None:
    columns = {"critic/explained_variance": (-0.5, 0.25, 0.75), "critic/loss": (2.0, 0.1, 0.01)}
    figures, _ = build_figures(Metrics((1, 2, 3), columns))
    by_title = {figure.title: figure for figure in figures}
    explained = by_title["Explained variance of the critic"]

    assert [trace["y"] for trace in explained.traces][-1] == [-0.5, 0.25, 0.75]
    assert explained.spec["layout"]["yaxis"]["range"] == [-1, 1.05]
    assert "Loss of the critic" in by_title
    _, absent = build_figures(Metrics((1,), {"reward/mean": (0.5,)}))
    assert not any("critic" in name.lower() for name in absent)
