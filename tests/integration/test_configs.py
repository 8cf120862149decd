"""The small files of ``configs/`` go together: one of each kind, in any order."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from command_line import ROOT

ENGINES = ("hf", "vllm", "sglang", "trtllm")


def read(path: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / path).read_text())
    return config


@pytest.mark.parametrize("name", ENGINES)
def test_engines_differ_in_their_own_options_alone(name: str) -> None:
    config, other = read(f"rollout/{name}.yaml"), read("rollout/vllm.yaml")
    assert config["model"].pop("rollout").keys() == other["model"].pop("rollout").keys()
    assert config == other


@pytest.mark.parametrize("path", sorted(str(p.relative_to(ROOT / "configs")) for p in ROOT.glob("configs/*/*.yaml")))
def test_a_piece_is_small(path: str) -> None:
    assert len((ROOT / "configs" / path).read_text().splitlines()) <= 60
    assert read(path)
