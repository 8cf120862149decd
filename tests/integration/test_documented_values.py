"""Each documented value of a run's configuration, in two steps."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, Job, run_job, samples

from rlplug.cli.configuration.option_checks import SECTIONS
from rlplug.observability.metrics_log import read_metrics
from rlplug.plugin_manager import plugins
from rlplug.types.ranges import hints_of


def documented(key: str, owner: Any) -> Iterator[tuple[str, str]]:
    """Yield the key and each value of the options of a class that list their values, and of the blocks in it."""
    options = inspect.signature(owner).parameters
    for name, hint in hints_of(owner).items():
        for choice in _choices(hint) if name in options else ():
            if typing.get_origin(choice) is typing.Literal:
                yield from ((f"{key}.{name}", str(value)) for value in typing.get_args(choice))
            elif choice is bool:
                yield from ((f"{key}.{name}", value) for value in ("true", "false"))
            elif inspect.isclass(choice) and dataclasses.is_dataclass(choice):
                yield from documented(f"{key}.{name}", choice)


def _choices(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, without annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    members = typing.get_args(hint) if "Union" in type(hint).__name__ else ()
    for member in members or (hint,):
        yield from _choices(member) if member is not hint else (hint,)


def values() -> list[tuple[str, str]]:
    """Return every documented value of the sections of a configuration, and of GRPO's and PPO's options."""
    found = [
        each for section, owner in SECTIONS.items() if section not in OTHERS for each in documented(section, owner)
    ]
    for algorithm in plugins().registry.each("algorithms"):
        if algorithm.__name__ in BY_ALGORITHM:
            found += documented("model.algorithm", algorithm)
    return sorted(set(found) - UNTRIED.keys())


OTHERS = ("trainer", "seed_everything")  # Lightning's own
BY_ALGORITHM = ("GRPO", "PFPPO")
UNTRIED = {
    ("model.policy.init", "pretrained"): "the tests' model has no weights",
    ("model.critic.trunk.init", "pretrained"): "likewise",
    ("model.reference.init", "pretrained"): "likewise",
    ("model.weight_sync.dtype", "fp8_block"): "needs an engine with FP8; plugins of engines try it",
    ("model.weight_sync.power_of_two_scales", "true"): "likewise",
    ("model.weight_sync.power_of_two_scales", "false"): "likewise",
    ("model.lora.sync", "adapters"): "needs an engine that serves adapters",
    ("model.router_replay", "true"): "needs a mixture of experts: test_experts.py",
    ("model.memory.sleep_between_rollouts", "true"): "needs an engine that sleeps",
    ("model.partial_rollout.asynchronous", "true"): "test_asynchronous_runs.py",
    ("model.validation.beside_training", "true"): "likewise",
    ("data.chat", "true"): "the tests' tokenizer has no chat template",
    ("data.continue_final_message", "true"): "likewise",
    ("profile.tool", "memory"): "needs a GPU",
    ("profile.tool", "nsys"): "needs nsys",
}
"""Values that are not tried here, and why."""
BESIDE = {
    "model.critic": ["-c", "configs/algo/ppo.yaml"],
    "model.critic.trunk": [
        *("-c", "configs/algo/ppo.yaml", "--model.critic.trunk.path", "tests/model"),
        *("--model.critic.trunk.init", "random"),
    ],
    "model.reference": [
        *("--model.algorithm.kl_coefficient", "0.1", "--model.reference.path", "tests/model"),
        *("--model.reference.init", "random"),
    ],
    "model.partial_rollout": [
        *("--model.partial_rollout.max_tokens_per_step", "3", "--model.algorithm.correction", "{}"),
    ],
    "model.lora": ["--model.lora.rank", "2"],
    "model.algorithm.kl_estimator": ["--model.algorithm.kl_coefficient", "0.1"],
    "model.algorithm.kl_in": ["-c", "configs/algo/pf_ppo.yaml"],
    "model.algorithm.whiten_advantages": ["-c", "configs/algo/pf_ppo.yaml"],
    "model.algorithm.keep": ["-c", "configs/algo/pf_ppo.yaml"],
    "profile": ["--profile.steps", "2"],
}
"""What a key needs beside it, by the key or what it begins with."""


@pytest.mark.parametrize(("key", "value"), samples(values(), ("model.batch.share_prefixes", "false")))
def test_a_documented_value_trains(tmp_path: Path, key: str, value: str) -> None:
    """Alone catches a value of the documentation that ends a run after its first rollout is paid for."""
    beside = [arguments for start, arguments in BESIDE.items() if f"{key}.".startswith(f"{start}.")]
    words = [word for arguments in beside[-1:] for word in arguments]
    result = run_job(
        Job([*SMALL, "--model.num_steps", "2", *words, f"--{key}", value, "--run.dir", str(tmp_path)]), tmp_path / "log"
    )
    assert result.exit_code == 0, result.output[-3000:]
    rows = read_metrics(tmp_path / "001" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    json.dumps(rows, allow_nan=False)
