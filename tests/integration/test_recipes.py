"""Recipes of ``configs/recipes``: planned as their comments say; those that a CPU can run take two steps there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
from command_line import ROOT, Job, run_job
from documentation import make_stand_in

from rlplug.observability.metrics_log import read_metrics

pytestmark = pytest.mark.nightly

NAMES = sorted(file.stem for file in ROOT.glob("configs/recipes/*.yaml"))
NEED_SERVERS = {"grpo_qwen3_1.7b_async"}


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("recipes")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_needs_what_its_comment_says(recipes: ModuleType, tmp_path: Path, name: str) -> None:
    """Catches a key that is no more, a recipe that does not fit any more, and a comment that was left behind."""
    line = ["plan", "--gpu-gib", "80", *recipes.planned_with(name, tmp_path)]
    result = run_job(Job(line), tmp_path / "plan.log")

    assert result.exit_code == 0, result.output[-3000:]
    assert recipes.printed_needs(result.output) == pytest.approx(recipes.said_needs(name), abs=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is(name: str) -> None:
    text = (ROOT / "configs" / "recipes" / f"{name}.yaml").read_text()
    head = [line for line in text.splitlines() if line.startswith("#")]

    assert head[1] == f"# rlplug fit --config configs/recipes/{name}.yaml"
    for beginning in ("# Data: ", "# Verifier: ", "# Planned for GPUs of 80 GiB"):
        assert any(line.startswith(beginning) for line in head)
    assert head[-1].startswith(("# Not run", "# Measured"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEED_SERVERS])
def test_a_recipe_takes_two_steps_on_a_cpu(recipes: ModuleType, tmp_path: Path, name: str) -> None:
    """Catches parts that refuse each other, and rows that become no prompts."""
    policy, data = make_stand_in(tmp_path / "policy"), tmp_path / "data.jsonl"
    (policy / "chat_template.jinja").write_text(recipes.TEMPLATE)
    row = {"prompt": "12+30", "answer": [str(number) for number in range(100)]}  # what a random policy may find
    data.write_text("".join(json.dumps(row | {"prompt": f"{number}+30"}) + "\n" for number in range(8)))
    arguments = [name, "--policy", str(policy), "--init", "random", "--data", str(data), "--accelerator", "cpu"]
    sizes = ["--steps", "2", "--prompts", "2", "--tokens", "8", "--out", str(tmp_path)]
    line = ["fit", *recipes.run_with(name, tmp_path, recipes.parse([*arguments, *sizes]))]
    result = run_job(Job(line), tmp_path / "fit.log")

    assert result.exit_code == 0, result.output[-3000:]
    run = tmp_path / name / "001"
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row][-1] == 2
    assert recipes.measured(run)["seconds per step"] > 0


def test_a_recipe_with_servers_is_refused_on_a_cpu(recipes: ModuleType, tmp_path: Path) -> None:
    for name in NEED_SERVERS:
        options = recipes.parse([name, "--accelerator", "cpu", "--out", str(tmp_path)])
        with pytest.raises(SystemExit, match="needs a GPU of its own"):
            recipes.run_with(name, tmp_path, options)
