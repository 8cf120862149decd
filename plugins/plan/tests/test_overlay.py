"""What ``rlplug plan --write`` writes beside a run's own configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from memory_cases import make_facts, on
from rlplug_plan.decisions import Decisions
from rlplug_plan.overlay import write_overlay
from rlplug_plan.plan import MemoryPlan

from rlplug.errors import ConfigError

RUN = {"model": {"optimizations": [{"class_path": "rlplug_optims.CompileBlocks"}, {"class_path": "x.EntropyChunking"}]}}


def decisions(gib: float, **others: object) -> Decisions:
    return Decisions(MemoryPlan(on(gib, make_facts(**others))), "", (), ())


def test_a_list_keeps_the_optimizations_that_go_with_the_new_one(tmp_path: Path) -> None:
    """Catches a list that replaces the run's, and one that the run refuses for two that exclude each other."""
    write_overlay(tmp_path / "plan.yaml", decisions(31, completion=16128, rows=4), RUN)
    found = yaml.safe_load((tmp_path / "plan.yaml").read_text())["model"]["optimizations"]
    names = [entry["class_path"] for entry in found]
    assert names == ["rlplug_optims.CompileBlocks", "x.EntropyChunking", "GradientCheckpointing"]


def test_what_is_the_users_to_choose_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set one of the alternatives"):
        write_overlay(tmp_path / "plan.yaml", decisions(20), RUN)
    assert not list(tmp_path.iterdir())
