"""``benchmarks/parity.py``: what its table says of engines that run, that are wrong, and that cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import run_forked
from rlplug_devkit.models import make_model_folder
from safetensors import safe_open

from rlplug.errors import ConfigError

pytestmark = pytest.mark.nightly  # a minute

SCRIPT = Path(__file__).parents[2] / "benchmarks/parity.py"
SHIFT = 0.25

SHIFTED = f"""
from dataclasses import replace
from rlplug.rollout.hf_engine import HFRollout

class Shifted(HFRollout):
    def generate(self, requests, sampling):
        completions = super().generate(requests, sampling)
        return [replace(c, logprobs=tuple(value + {SHIFT} for value in c.logprobs)) for c in completions]
"""


def run(tmp_path: Path, **values: Any) -> subprocess.CompletedProcess[str]:
    (tmp_path / "parity.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, SCRIPT, tmp_path / "parity.yaml", "--out", tmp_path / "out"]
    return run_forked(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)


def script() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("parity_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["parity_script"] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    make_model_folder("llama", tmp_path / "model")
    return {"model": str(tmp_path / "model"), "dtype": "float32", "device": "cpu", "deadline_s": 120}


def test_each_engine_is_compared_with_the_trainer(tmp_path: Path, model: dict[str, Any]) -> None:
    (tmp_path / "shifted.py").write_text(SHIFTED)
    rows = [json.dumps({"prompt": text}) for text in ("ABC", "DEFGH", "I")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    engines = [
        {"engine": "HFRollout", "init_args": {"max_batch_size": 3}},
        {"engine": "shifted.Shifted", "environment": {"PYTHONPATH": str(tmp_path)}},
    ]
    sampling = {"max_new_tokens": 12, "temperature": 0.7, "top_k": 20}
    prompts = {"file": str(tmp_path / "prompts.jsonl")}

    done = run(tmp_path, **model, prompts=prompts, samples_per_prompt=2, sampling=sampling, engines=engines)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/report.json").read_text())["engines"]
    right, shifted = found["HFRollout"], found["shifted.Shifted"]
    assert right["max"] < 2e-4  # the conformance kit's tolerance in float32
    assert shifted["mean"] == pytest.approx(SHIFT, abs=1e-4)
    assert shifted["max"] == pytest.approx(SHIFT, abs=2e-4)
    assert right["tokens"] == shifted["tokens"] <= 6 * 12
    with safe_open(tmp_path / "model/model.safetensors", framework="pt") as file:
        names = file.keys()
        assert right["sync_bytes"] == 4 * sum(file.get_tensor(name).numel() for name in names)


def test_an_engine_that_cannot_run_has_a_row_that_says_why_and_the_others_go_on(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    engines = [
        {"engine": "HFRollout", "name": "elsewhere", "python": str(tmp_path / "bin/python")},
        {"engine": "HFRollouts"},
    ]
    done = run(tmp_path, **model, prompts={"count": 3, "length": 5}, engines=engines)

    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "out/report.json").read_text())["engines"]
    assert "does not start" in found["elsewhere"]["failure"]
    assert "Did you mean 'HFRollout'?" in found["HFRollouts"]["failure"]
    report = (tmp_path / "out/report.md").read_text()
    assert "3 prompts of 5 tokens" in report
    assert report.strip() == done.stdout.strip()
    table = [line for line in report.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1, table
    assert [line.split("|")[1].strip() for line in table[2:]] == ["elsewhere", "HFRollouts"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": {"count": 1, "lenght": 5}}, "prompts.lenght is no key here. Did you mean 'length'?"),
        ({"prompts": {"count": 1}}, "prompts: give count and length"),
        ({"engines": [{"engine": "HFRollout"}] * 2}, "give those that come twice a name"),
    ],
)
def test_a_mistake_in_the_file_names_the_key(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    right = {"model": "m", "prompts": {"count": 1, "length": 2}, "engines": [{"engine": "HFRollout"}]}
    (tmp_path / "parity.yaml").write_text(yaml.safe_dump(right | values))
    with pytest.raises(ConfigError, match=re.escape(message)):
        script().read_comparison(tmp_path / "parity.yaml")


def test_the_example_can_be_read() -> None:
    comparison = script().read_comparison(SCRIPT.with_suffix(".yaml"))
    assert [entry.engine for entry in comparison.engines] == ["HFRollout", "VLLMRollout", "SGLangRollout"]
