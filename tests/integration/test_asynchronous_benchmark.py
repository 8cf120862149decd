"""``benchmarks/asynchronous.py``: what stays of runs that end, fail or are cut, and what the table says of them."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.nightly  # of a benchmark

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = """
import json, pathlib, sys, time
steps, status = json.loads(sys.argv[-1])
folder = pathlib.Path(sys.argv[-2]) / "001"
folder.mkdir()
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, steps + 1):
        row = {"step": step, "reward/mean": step / 10, "time/step": 2.0}
        row |= {"time/validate": 0.5, "validate/pass@1": 0.25} if step == 3 else {}
        file.write(json.dumps(row) + "\\n")
    file.write('{"step": 4, "rew')  # of a step whose line was being written
print("the reason", flush=True)
time.sleep(3600 if status is None else 0)
sys.exit(status)
"""
"""A run that writes rows as ``rlplug fit`` does, then hangs or ends."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("asynchronous")
    script = tmp_path / "benchmarks/run.py"
    script.parent.mkdir()
    script.write_text(RUN)
    monkeypatch.setattr(module, "__file__", str(script))
    return module


@pytest.mark.parametrize(
    ("mode", "what", "said"),
    [
        ("synchronous", "[3, 0]", ""),
        ("asynchronous, K = 1", "[2, 1]", "ended with status 1 after 2 steps, and said:\nthe reason"),
        ("streamed, K = 0", "[1, null]", "its time was over after 1 steps"),
    ],
)
def test_the_rows_of_each_run_stay(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, what: str, said: str
) -> None:
    """It catches a failed run that nobody hears of, one that outlives its time, and rows that are lost with it."""
    monkeypatch.setattr(benchmark, "command_of", lambda mode, seed, folder, options: [str(folder), what])
    folder, options = benchmark.folder_of(mode, 0, tmp_path), argparse.Namespace(out=tmp_path, steps=3)

    def is_over() -> bool:
        return what == "[1, null]" and len(benchmark.read(folder)) == 1

    assert benchmark.train(mode, 0, options, is_over) == said
    rows = benchmark.read(folder)
    assert [row["seconds"] for row in rows] == [2.0, 4.0, 5.5][: len(rows)]  # without the validation
    if len(rows) == 3:
        (folder / "log").unlink()
        assert benchmark.train(mode, 0, options, is_over) == ""
        assert not (folder / "log").exists()  # it was not run again
        table = importlib.import_module("asynchronous_table").table
        cells = [cell.strip() for cell in table({mode: {0: rows}}).splitlines()[-1].split("|")]
        assert cells[3:7] == ["3", *["0.200 (0.200 to 0.200)"] * 2, "0.250 (0.250 to 0.250)"]
