from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rlplug_envs.verifiers_environment import VerifiersEnvironment
from rlplug_envs.verifiers_source import VerifiersSource

from rlplug.errors import ConfigError

pytest.importorskip("verifiers", reason="the package verifiers is not installed")

HERE = Path(__file__).parent
CASES = "verifiers-cases"


@pytest.fixture(autouse=True)
def importable_cases(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def test_rows_are_the_environments_examples():
    rows = list(VerifiersSource(CASES, {"kind": "single"}).rows())
    assert [row.uid for row in rows] == [f"{CASES}/train:0", f"{CASES}/train:1"]
    assert rows[1].prompt == [{"role": "user", "content": "Capital of Peru?"}]
    assert rows[1].answer == "Lima"
    assert rows[1].metadata["environment"] == CASES
    assert rows[1].metadata["example"]["example_id"] == 1
    assert json.loads(json.dumps(rows[1].metadata)) == rows[1].metadata


def test_the_environments_system_prompt_is_part_of_the_prompt():
    [row] = VerifiersSource(CASES, {"kind": "dialog"}).rows()
    assert [message["role"] for message in row.prompt] == ["system", "user"]
    assert row.prompt[0]["content"] == "You guess numbers."


def test_a_limit_and_the_split_for_evaluation():
    assert len(list(VerifiersSource(CASES, {"kind": "single"}, limit=1).rows())) == 1
    [row] = VerifiersSource(CASES, {"kind": "single"}, split="eval").rows()
    assert (row.uid, row.answer) == (f"{CASES}/eval:0", "N'Djamena")


REFUSED = {
    "judge": "its JudgeRubric needs a judge model",
    "group_reward": "scores several completions together",
    "no_environment": "returns a types.SimpleNamespace",
    "no_such_kind": "verifiers cannot load it",
    "image": "example 0 has a part of type 'image_url': only text",
    "dialog": "has no examples for split 'eval'",
}
LOADS = """
import json, sys
from rlplug_envs.hosted.loading import Refusal, examples, load
for kind in sys.argv[1:]:
    try:
        examples(load("verifiers-cases", {"kind": kind}), "eval" if kind == "dialog" else "train", 0, 9)
    except Refusal as refusal:
        print("REFUSED", json.dumps([kind, str(refusal)]))
"""


def test_environments_that_need_what_is_not_here_are_refused_by_name():
    path = json.dumps(sys.path)
    program = f"import sys; sys.path[:] = {path}\n{LOADS}"
    done = subprocess.run(
        [sys.executable, "-c", program, *REFUSED, "single"], stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    refused = dict(json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("REFUSED "))
    assert refused.keys() == REFUSED.keys()
    for kind, message in REFUSED.items():
        assert message in refused[kind]


def test_an_environment_that_is_not_installed_is_a_mistake_of_the_configuration():
    environment = VerifiersEnvironment("no-such-environment", num_processes=1)
    with pytest.raises(ConfigError, match=r"environment 'no-such-environment'.*no_such_environment"):
        environment.tools()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "VerifiersEnvironment.num_processes is 0"),
        ({"stall_timeout_s": 0.0}, "VerifiersEnvironment.stall_timeout_s is 0"),
        ({"arguments": {"a": {1}}}, "VerifiersEnvironment.arguments is"),
    ],
)
def test_an_option_that_cannot_be_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        VerifiersEnvironment(CASES, **options)
