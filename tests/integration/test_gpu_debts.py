"""``benchmarks/gpu_debts.py``: its commands are understood, and it shares GPUs, ends what hangs, and keeps figures."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.nightly  # of a benchmark

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def debts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_debts")


def test_the_benchmarks_take_each_command(debts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A mistake in an argument would be found on a GPU alone."""
    monkeypatch.setenv("RANK", "0")
    parsed = []
    for debt, is_tiny in itertools.product(debts.DEBTS.values(), (False, True)):
        for command in debts.commands_of(debt, tmp_path, sys.executable, is_tiny):
            script = next((word for word in command if word.startswith("benchmarks/")), "")
            on_gpu = {
                "benchmarks/rollout.py": ["--device", "cuda"],
                "benchmarks/update.py": [],
                "benchmarks/lora_serving.py": [],
                "benchmarks/server_delivery.py": [],
                "benchmarks/step.py": [],
                "benchmarks/step_modes.py": [],
                "benchmarks/start.py": [],
            }
            if script in on_gpu:
                monkeypatch.setattr(sys, "argv", command[command.index(script) :] + on_gpu[script])
                importlib.import_module(Path(script).stem).parse()
                parsed.append(debt.name)
            assert not [word for word in command if debts.PAIR.search(word)]
    known = {"gradients-64k", "lora-8b", "lora-serving", "start", "vllm-tp2-fp8", "modes-long", "modes-two-gpus"}
    assert known <= {*parsed}


def runner(debts: ModuleType, folder: Path, budget: float) -> object:
    options = argparse.Namespace(out=folder, budget=budget, tiny=True)
    options.about = {"gpus": ["a", "b"], "gib": 140, "torch": "2", "date": "today", "commit": "", "tiny": True}
    return debts.Runner(options, 2, debts.Engines({}, {}))


def test_claims_share_gpus_and_outcomes_are_kept(debts: ModuleType, tmp_path: Path) -> None:
    """Timed claims must be alone on their GPU, those of two GPUs alone on both, and a failure must not end the rest."""
    note = tmp_path / "notes"
    notes = f"import os, time; f = open({str(note)!r}, 'a', 1)"

    def claim(name: str, code: str = "", beside: str = "", **values: object) -> object:
        busy = f"{notes}; g = os.environ['CUDA_VISIBLE_DEVICES']; f.write(f'{name} + {{g}}\\n'); time.sleep(0.5); "
        busy += f"[time.sleep(0.05) for _ in range(400) if '{beside} +' not in open({str(note)!r}).read()]; "
        busy += f"f.write(f'{name} - {{g}}\\n'); {code}"
        values = {"seconds": 1, "gib": 60} | values
        return debts.Debt(name, "", ((sys.executable, "-c", busy),), **values)

    asked = [
        claim("first", "print('{\"figure\": 7}')", beside="third"),
        claim("second", "print('3 passed in 0.1s')"),
        claim("third"),
        claim("timed", is_timed=True),
        claim("both", "raise SystemExit(3)", gpus=2),
        claim("four GPUs", gpus=4),
        claim("no engine", engine="no_such_engine"),
        dataclasses.replace(claim("hangs"), commands=(("sleep", "60"),), seconds=-29),  # its limit is 2 s
        claim("too long", seconds=1000),
    ]
    runs = runner(debts, tmp_path, 60.0)
    began = time.monotonic()
    runs.run(asked)

    assert time.monotonic() - began < 30
    results = {name: outcome.result for name, outcome in runs.outcomes.items()}
    ran = ["first", "second", "third", "timed"]
    others = dict.fromkeys(("four GPUs", "no engine", "too long"), "not run")
    assert results == dict.fromkeys(ran, "ran") | others | {"both": "failed", "hangs": "timed out"}
    on: dict[str, set[str]] = {"0": set(), "1": set()}
    seen = set()
    for line in note.read_text().splitlines():
        name, sign, gpus = line.rsplit(" ", 2)
        for gpu in gpus.split(","):
            on[gpu] = on[gpu] | {name} if sign == "+" else on[gpu] - {name}
            assert len(on[gpu]) == 1 or not on[gpu] & {"timed", "both"}
            seen.add(frozenset(on[gpu]))
        assert "both" not in on["0"] | on["1"] or on["0"] == on["1"] or sign == "-"
    assert any(len(together) == 2 for together in seen)
    kept = json.loads((tmp_path / "debts.json").read_text())["outcomes"]
    assert kept["first"]["figures"] == [{"figure": 7}]
    assert kept["second"]["figures"] == [{"pytest": "3 passed in 0.1s"}]
    assert "| 7 |" in (tmp_path / "debts.md").read_text()
