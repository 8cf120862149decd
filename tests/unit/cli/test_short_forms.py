"""Short forms of keys and values: what is written out, what an option of its own would take, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplug.cli.configuration.config_files import load_yaml
from rlplug.cli.configuration.early_checks import check_early
from rlplug.cli.configuration.short_forms import with_defaults, write_out, write_out_arguments
from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.errors import ConfigError

FILE = {"class_path": "FileSource", "init_args": {"path": "train.jsonl"}}
FUNCTION = {"class_path": "FunctionReward", "init_args": {"function": "my_rewards.score"}}


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"policy": "org/model"}, {"model": {"policy": {"path": "org/model"}}}),
        (
            {"model": {"policy": "a", "reference": "b"}},
            {"model": {"policy": {"path": "a"}, "reference": {"path": "b"}}},
        ),
        ({"train": "train.jsonl"}, {"data": {"train": FILE}}),
        ({"data": {"val": "train.jsonl"}}, {"data": {"val": FILE}}),
        (
            {"train": "org/data"},
            {"data": {"train": {"class_path": "HFDatasetSource", "init_args": {"path": "org/data"}}}},
        ),
        ({"train": "my_data.MySource"}, {"data": {"train": "my_data.MySource"}}),
        ({"train": "x" * 5000}, {"data": {"train": "x" * 5000}}),  # longer than the name of a file may be
        ({"rewards": "MathVerify"}, {"model": {"rewards": [{"class_path": "MathVerify"}]}}),
        ({"rewards": ["my_rewards.score", FUNCTION]}, {"model": {"rewards": [FUNCTION, FUNCTION]}}),
        ({"rewards": "my_rewards.Brevity"}, {"model": {"rewards": [{"class_path": "my_rewards.Brevity"}]}}),
        ({"max_new_tokens": 8, "model": {"seed": 1}}, {"model": {"seed": 1, "sampling": {"max_new_tokens": 8}}}),
        (
            {"model": {"policy": {"path": "a"}}, "run": {"dir": "b"}},
            {"model": {"policy": {"path": "a"}}, "run": {"dir": "b"}},
        ),
        ({"model": None, "data": 3}, {"model": None, "data": 3}),
    ],
)
def test_a_file_is_written_out(short: dict[str, Any], long: dict[str, Any], tmp_path: Path) -> None:
    given = json.dumps(short)
    assert write_out(short) == long
    assert json.dumps(short) == given  # what was read is as it was
    assert load_yaml(yaml.dump(short), tmp_path / "config.yaml") == long


def test_a_key_in_both_forms_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'policy' stands for model\.policy, which is there too"):
        write_out({"policy": "a", "model": {"policy": "b"}})


def test_a_file_in_place_of_a_block_is_not_dropped() -> None:
    with pytest.raises(ConfigError, match=r"'policy' stands for model\.policy, and model is no block"):
        write_out({"policy": "a", "model": "model.yaml"})


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["--policy", "org/model"], ["--model.policy.path", "org/model"]),
        (["--model.policy=org/model"], ["--model.policy.path", "org/model"]),
        (["--train", "train.jsonl"], ["--data.train", json.dumps(FILE)]),
        (
            ["--reward", "MathVerify", "--num_steps=3", "--reward", "my_rewards.score"],
            ["--model.num_steps", "3", "--model.rewards", json.dumps([{"class_path": "MathVerify"}, FUNCTION])],
        ),
        (["--model.rewards+=my_rewards.score"], ["--model.rewards+", json.dumps(FUNCTION)]),
        (
            ["--rollout.max_num_seqs=8", "--algorithm.lam", "1"],
            ["--model.rollout.max_num_seqs=8", "--algorithm.lam", "1"],
        ),
        (["--model.rewards+={class_path: A}"], ["--model.rewards+", "{class_path: A}"]),
        (
            ["--verbose", "-c", "a.yaml", "--model.seed", "3"],
            ["--run.verbose", "true", "-c", "a.yaml", "--model.seed", "3"],
        ),
    ],
)
def test_arguments_are_written_out(short: list[str], long: list[str]) -> None:
    assert write_out_arguments(short) == long


@pytest.mark.parametrize("arguments", [["--policy"], ["--train", "--reward", "MathVerify"]])
def test_a_short_form_without_a_value_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{arguments[0]} needs a value, such as"):
        write_out_arguments(arguments)


@pytest.mark.parametrize(
    ("arguments", "content", "added"),
    [
        (["fit"], {}, ["--model.algorithm", "GRPO"]),
        (["fit"], {"model": {"algorithm": "DAPO"}}, []),
        (["fit", "--model.algorithm", "DAPO"], {}, []),
        (["fit", "--model.algorithm.help", "DAPO"], {}, []),
    ],
)
def test_a_run_without_an_algorithm_takes_grpo(arguments: list[str], content: Any, added: list[str]) -> None:
    assert with_defaults(arguments, [content]) == [arguments[0], *added, *arguments[1:]]


@pytest.mark.parametrize(
    ("accelerator", "in_file", "chosen"),
    [(None, {}, "Fast"), ("gpu", {}, "Fast"), ("cpu", {}, None), (None, {"rollout": None}, None)],
)
def test_a_gpu_run_takes_the_engine_that_prefers_it_most(
    accelerator: str | None, in_file: dict[str, Any], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a CPU run that starts vLLM, and a resumed run that changes its engine."""
    preferences = {"Slow": 1, "Fast": 30, "OnlyNamed": 0}

    class Registry:
        names = staticmethod(lambda kind: [])

        @staticmethod
        def each(kind: str) -> Any:
            for name, number in preferences.items():
                yield type(name, (), {"preference": staticmethod(lambda device, number=number: number)})

    monkeypatch.setattr(
        "rlplug.cli.configuration.short_forms.plugins", lambda: type("Manager", (), {"registry": Registry})
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    options = [] if accelerator is None else ["--trainer.accelerator", accelerator]
    found = with_defaults(["fit", *options], [{"model": in_file}])
    assert ("--model.rollout" in found) == (chosen is not None)
    assert chosen is None or found[1:3] == ["--model.rollout", chosen]


def test_four_keys_are_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rlplug"])
    file = tmp_path / "run.yaml"
    file.write_text("policy: some/model\ntrain: train.jsonl\nrewards: ExactMatch\nnum_steps: 3\n")
    cli: Any = read_command(
        ConfiguredCLI,
        ["fit", "-c", str(file), "--reward", "examples.quickstart.reward.digits_in_place", "--max_new_tokens", "9"],
    )
    config = cli.model.config
    assert (config.policy.path, config.num_steps, config.sampling.max_new_tokens) == ("some/model", 3, 9)
    assert type(config.algorithm).__name__ == "GRPO"
    assert [type(reward).__name__ for reward in config.rewards] == ["FunctionReward"]
    assert cli.datamodule.train.path == "train.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  num_stepz: 3\n", r"there is no key 'model.num_stepz'. Did you mean 'model.num_steps'\?"),
        (
            "model: {limits: {max_grad_nrm: 1}}",
            r"'model.limits.max_grad_nrm'. Did you mean 'model.limits.max_grad_norm'",
        ),
        ("model: {load_in_4bit: true}", "QLoRA"),
        ("trainer: {acelerator: cpu}\nmodel: {algorithm: {init_args: {x: 1}}, critic: {y: 2}}\nmine: {z: 3}", None),
        ("model: &a {policy: *a}", None),
        ("model: [", None),
    ],
)
def test_a_key_of_the_core_is_checked_before_slow_imports(text: str, message: str | None, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    if message is None:
        check_early(["-c", str(file)])
        return
    with pytest.raises(ConfigError, match=message):
        check_early(["-c", str(file)])
