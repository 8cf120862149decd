"""Runs whose weights travel in FP8, by the command line: what took effect, what is measured, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import SMALL, Job, Runs

from rlplug.observability.metrics_log import read_metrics

FP8 = ["--model.weight_sync.dtype", "fp8_block", "--model.num_steps", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def results(folder: Path) -> Runs:
    lines = {
        "plain": ["--model.num_steps", "2"],
        "fp8": FP8,
        "kept": [*FP8, "--model.weight_sync.keep", '["*.self_attn.*"]'],
        "uncorrected": [*FP8, "--model.algorithm.correction", "null"],
        "misspelled": [*FP8, "--model.weight_sync.keep", '["*.attention.*"]'],
        "no dtype": ["--model.weight_sync.keep_first_layers", "1"],
        "unable": [*FP8, "--model.rollout", "parts.Silent", "--model.limits.mismatch_gate", "null"],
    }
    return Runs({n: Job([*SMALL, *line, "--run.dir", str(folder / n)]) for n, line in lines.items()}, folder)


def rows_of(folder: Path, results: Runs, name: str) -> list[dict[str, float]]:
    results.ended(name)
    return read_metrics(folder / name / "001" / "metrics.jsonl")


def effects_of(folder: Path, results: Runs, name: str) -> list[str]:
    results.ended(name)
    effects: list[str] = json.loads((folder / name / "001" / "run.json").read_text())["effects"]
    return [effect for effect in effects if "FP8" in effect]


def test_what_travels_in_fp8_is_said(folder: Path, results: Runs) -> None:
    (effect,) = effects_of(folder, results, "fp8")
    assert effect == "weight sync in FP8: 14 of 15 linear layers, with power-of-two scales; 1 kept: lm_head"
    assert effect in results["fp8"].message
    (effect,) = effects_of(folder, results, "kept")
    assert "6 of 15 linear layers" in effect
    assert "9 kept: model.layers.*.self_attn.q_proj (2)" in effect
    assert not effects_of(folder, results, "plain")


def test_fewer_bytes_travel(folder: Path, results: Runs) -> None:
    gib = {name: float(rows_of(folder, results, name)[0]["sync/gib"]) for name in ("plain", "kept", "fp8")}
    assert gib["fp8"] < gib["kept"] < gib["plain"]
    assert gib["fp8"] < 0.5 * gib["plain"]  # of float32


def test_the_mismatch_of_fp8_is_measured_and_corrected(folder: Path, results: Runs) -> None:
    plain, fp8 = rows_of(folder, results, "plain"), rows_of(folder, results, "fp8")
    for row, other in zip(plain, fp8, strict=True):
        assert row["mismatch/mean"] < 1e-5 < other["mismatch/mean"]
        assert "correction/weight_mean" not in row
        assert other["correction/weight_mean"] > 0
        assert other["mismatch/weight_p1"] < other["mismatch/weight_p99"]


def test_a_run_without_correction_says_so(folder: Path, results: Runs) -> None:
    assert "correction/weight_mean" not in rows_of(folder, results, "uncorrected")[0]
    assert "GRPO does not correct for that: set its init_args.correction" in results["uncorrected"].message
    assert "does not correct" not in results["fp8"].message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("misspelled", "model.weight_sync.keep has '*.attention.*', which matches no linear layer"),
        ("no dtype", "its dtype is null: set model.weight_sync.dtype to fp8_block, or remove"),
        (
            "unable",
            "model.weight_sync.dtype needs an engine with 'fp8_refit', which Silent lacks. Engines here that",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(results: Runs, name: str, words: str) -> None:
    assert results[name].exit_code == 2
    assert words in results[name].message
    assert "took effect" not in results[name].message
