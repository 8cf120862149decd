"""A run that somebody sent: nothing of its reader's gets into a page, is overwritten or waits for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import make_run
from rlplug_watch.config_values import flat_config, masked_config
from rlplug_watch.metrics_file import MetricsFile
from rlplug_watch.own_files import MAX_TEXT_BYTES, own_path, own_text
from rlplug_watch.page.sample_index import SampleIndex
from rlplug_watch.report.page import write_report
from rlplug_watch.run_state import is_locked, with_state

from rlplug.distributed.durable_files import whole_lines

SECRET = "the-reader-alone-knows-this"
DEEP = "a: " + "[" * 100_000 + "]" * 100_000
SPARSE = 1 << 40
"""Length of a file that takes no room on its disk, which an archive may hold."""
GROWING = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))


def lead(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def lead_folder(run: Path, target: Path) -> None:
    """Put a link to a folder where the run has one of its own."""
    target.with_name("summary.txt").write_text(SECRET)
    (run / "profile").symlink_to(target.parent)


STRANGE: dict[str, Callable[[Path, Path], object]] = {
    "config is a link": lambda run, mine: lead(run / "config.yaml", mine),
    "record is a link": lambda run, mine: lead(run / "run.json", mine),
    "samples are a link": lambda run, mine: lead(run / "samples.jsonl", mine),
    "page is a link": lambda run, mine: lead(run / "report.html", mine),
    "former page is a link": lambda run, mine: lead(run / "report.html.partial", mine),
    "a folder is a link": lead_folder,
    "config is nested": lambda run, _: (run / "config.yaml").write_text(DEEP),
    "config grows": lambda run, _: (run / "config.yaml").write_text(GROWING),
    "config is huge": lambda run, _: (run / "config.yaml").write_bytes(bytes(MAX_TEXT_BYTES + 1)),
    "record is nested": lambda run, _: (run / "run.json").write_text("[" * 100_000),
    "a sample is nested": lambda run, _: (run / "samples.jsonl").write_text("[" * 100_000 + "\n"),
    "samples are zeros": lambda run, _: os.truncate(run / "samples.jsonl", SPARSE),
    "metrics are zeros": lambda run, _: os.truncate(run / "metrics.jsonl", SPARSE),
    "groups are zeros": lambda run, _: [(run / "groups.jsonl").touch(), os.truncate(run / "groups.jsonl", SPARSE)],
    "config is a pipe": lambda run, _: [(run / "config.yaml").unlink(), os.mkfifo(run / "config.yaml")],
    "samples are a pipe": lambda run, _: [(run / "samples.jsonl").unlink(), os.mkfifo(run / "samples.jsonl")],
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_report_has_the_run_s_own_files_alone(tmp_path: Path, what: str) -> None:
    """Catches a reader that follows links or waits, a writer that follows them, and YAML without an end."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f'{{"password_of": "{SECRET}", "step": 1, "prompt": "{SECRET}", "completion": "{SECRET}"}}\n')
    before = mine.read_text()
    run = make_run(tmp_path / "run", num_steps=3)
    STRANGE[what](run, mine)
    began = time.monotonic()
    page = write_report(run, is_single_file=False)
    assert time.monotonic() - began < 60
    assert SECRET not in page.read_text()
    assert (mine.read_text(), page.is_symlink()) == (before, False)


def test_a_lock_that_is_a_pipe_says_nothing_at_once(tmp_path: Path) -> None:
    """Catches ``watch`` that waits for ever for a process that opens the pipe."""
    os.mkfifo(tmp_path / "run.lock")
    assert is_locked(tmp_path / "run.lock") is None
    assert with_state({"status": "unfinished"}, tmp_path) == {"status": "unfinished"}


def test_a_file_of_zeros_is_read_in_time_and_memory(tmp_path: Path) -> None:
    """Catches ``watch`` that holds a terabyte as one line, or looks for its end."""
    run = make_run(tmp_path / "run", num_steps=3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        os.truncate(run / name, SPARSE)
    began = time.monotonic()
    metrics = MetricsFile(lambda: run / "metrics.jsonl")
    assert metrics.latest(["reward/mean"]) == {}
    assert metrics.sampled("reward/mean", 4)[0].tolist() == [0.0]
    index = SampleIndex(run / "samples.jsonl")
    index.grow(0.5)
    assert not index.is_complete
    assert [row["step"] for row in whole_lines(run / "metrics.jsonl")] == [0, 1, 2]
    assert time.monotonic() - began < 60


def test_what_has_no_end_is_not_shown() -> None:
    assert masked_config(DEEP) == masked_config(GROWING) == ""
    assert "hunter2" not in masked_config("model: {api_key: hunter2}\n\0bad: [\n")


def test_own_files_are_those_no_link_leads_to(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "profile").mkdir(parents=True)
    (run / "profile" / "summary.txt").write_text("time")
    (tmp_path / "link").symlink_to(run)
    (run / "other").symlink_to(run / "profile")
    assert own_path(tmp_path / "link", "profile/summary.txt") is not None  # the reader's own link
    assert own_path(run, "other/summary.txt") is None
    assert own_path(run, "profile") is None
    with pytest.raises(ValueError, match="more than 3 bytes"):
        own_text(run / "profile" / "summary.txt", 3)
    assert flat_config(None) == {}
