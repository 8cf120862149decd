"""``rlplug eval`` with vLLM on the CPU: one engine takes the weights of two policies, from files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` installs vLLM")

ROOT = Path(__file__).parents[3]
VLLM = ["--engine", "VLLMRollout", "--model.rollout.kv_cache_gib=0.25"]


@pytest.mark.nightly
def test_two_policies_score_as_with_transformers(tmp_path):
    """Greedy completions of random weights: an engine that kept the first policy's would repeat them."""
    found = {}
    for engine, named in {"vllm": VLLM, "hf": []}.items():
        arguments = ["-c", "configs/quickstart.yaml", "--base", *named, "--out", str(tmp_path / engine)]
        other = tmp_path / "other"
        if not other.exists():
            _write_other_policy(other)
        command = [sys.executable, "-m", "rlplug", "eval", str(other), *arguments]
        options = {"env": os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}, "timeout": 600}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert (done.stdout + done.stderr).count("started in") == (engine == "vllm"), "the second by a sync alone"
        lines = (tmp_path / engine / "001" / "completions.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found[engine] = {(row["policy"], row["prompt_uid"]): row["completion"] for row in rows}
    assert found["vllm"].keys() == found["hf"].keys()
    same = [found["vllm"][key] == found["hf"][key] for key in found["hf"]]
    assert sum(same) / len(same) > 0.95, "near ties of random weights may fall otherwise"
    policies = {name for name, _ in found["vllm"]}
    texts = [[text for (name, _), text in found["vllm"].items() if name == policy] for policy in policies]
    assert texts[0] != texts[1]


def _write_other_policy(folder: Path) -> None:
    """Write the quickstart's model with weights of another seed."""
    code = (
        "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
        "torch.manual_seed(7); source = 'examples/quickstart/model'\n"
        "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(sys.argv[1])\n"
        "AutoTokenizer.from_pretrained(source).save_pretrained(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, timeout=300)
