"""What is read: scripts, overrides, references and YAML; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command_line import SMALL, Job, Runs
from migrate_cases import converted
from rlplug_migrate.command import import_config_command
from rlplug_migrate.conversion import Unresolved
from rlplug_migrate.frameworks import FRAMEWORKS
from rlplug_migrate.inputs import read_command, read_file

from rlplug.errors import ConfigError

VERL = FRAMEWORKS["verl"]
SCRIPT = """\
set -xeuo pipefail
MODEL=${MODEL:-Qwen/Qwen3-8B}   # set it from outside
FILES="['$HOME/a b/train.parquet', '$HOME/math/train.parquet']"
length=$((1024 * 2))
tp=2
EXTRA=()
case "$DEVICE" in
    npu) tp=4; sp=3
        tp=4
        sp=3
        EXTRA+=(trainer.device=npu)
        ;;
esac
DATA=(
    algorithm.adv_estimator=grpo   # the group's
    data.train_files="$FILES"
    data.max_prompt_length=$((length / 2))
    # data.max_response_length=7
)
DATA+=(data.max_response_length=${length})
uv run python3 -m verl.trainer.main_ppo \\
    "${DATA[@]}" \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$tp \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp} \\
    trainer.project_name='a $MODEL b' \\
    trainer.experiment_name=run_$(date +%m) \\
    +trainer.total_epochs=3 \\
    "${EXTRA[@]}" "$@" 2>&1 | tee log.txt
echo data.train_batch_size=9
"""


def test_a_script_is_followed_without_being_run(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    values, doubts = read_file(VERL, file)

    unresolved = {name: value.reason for name, value in values.items() if isinstance(value, Unresolved)}
    assert {name: value for name, value in values.items() if name not in unresolved} == {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": ["${HOME}/a b/train.parquet", "${HOME}/math/train.parquet"],
        "data.max_prompt_length": 1024,
        "data.max_response_length": 2048,
        "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "trainer.project_name": "a $MODEL b",
        "trainer.total_epochs": 3,
    }
    assert unresolved == {
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "not resolved: $sp is assigned in a branch of the script",  # noqa: E501
        "trainer.experiment_name": "not resolved: $(date +%m) is what a program prints",
    }
    assert doubts.keys() == {"$tp", "$EXTRA"}


def test_references_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    block = {
        "defaults": ["actor@actor_rollout_ref.actor: dp_actor", "_self_"],
        "trainer": {"project_name": "p", "experiment_name": "${trainer.project_name}-x", "logger": "${nowhere.to}"},
        "critic": {"ppo_epochs": "${oc.select:actor_rollout_ref.actor.ppo_epochs,3}", "grad_clip": "${.ppo_epochs}"},
        "data": {
            "train_files": "${oc.env:DATA,/data}/t.parquet",
            "max_prompt_length": "${oc.select:a.b,${data.n}}",
            "n": 5,
        },
        "algorithm": {"gamma": "1e-1", "lam": "???"},
    }
    file.write_text(yaml.safe_dump(block))
    values, _ = read_file(VERL, file)

    assert values["trainer.experiment_name"] == "p-x"
    assert values["critic.ppo_epochs"] == values["critic.grad_clip"] == 3
    assert values["data.train_files"] == "${DATA:-/data}/t.parquet"
    assert values["data.max_prompt_length"] == 5
    assert values["trainer.logger"] == Unresolved("nowhere.to", "not resolved: ${nowhere.to}, whose key is not given")
    assert "algorithm.lam" not in values


def test_overrides_as_hydra_takes_them() -> None:
    words = ["++data.train_batch_size=8", "+trainer.nnodes=2", "trainer.save_freq=5", "~trainer.save_freq"]
    words += ["actor_rollout_ref.actor.optim.lr=1e-6", "trainer.logger=[console,wandb]", "data.truncation='error'"]
    assert read_command(VERL, words) == {
        "data.train_batch_size": 8,
        "trainer.nnodes": 2,
        "trainer.save_freq": None,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "trainer.logger": ["console", "wandb"],
        "data.truncation": "error",
    }


def test_what_is_not_resolved_is_not_the_default_in_silence() -> None:
    draft = converted("verl", "algorithm.adv_estimator=grpo", "data.train_batch_size=${other.key}")
    assert draft.lacking["data.train_batch_size"].startswith("not resolved: ${other.key}")
    assert "not resolved" in draft.from_defaults["model.batch.prompts_per_step"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "run.yaml", tmp_path / "quickstart.yaml"
    arguments = ["verl", "--out", str(out), "--", "algorithm.adv_estimator=grpo", "data.train_files=t.parquet"]
    assert import_config_command(arguments) == 0
    assert yaml.safe_load(out.read_text())["data"]["train"]["init_args"]["path"] == "t.parquet"
    assert "several files" in capsys.readouterr().err

    with pytest.raises(ConfigError, match=r"exists, and is not overwritten"):
        import_config_command(arguments)
    with pytest.raises(ConfigError, match=r"give verl's file or, behind --"):
        import_config_command(["verl"])
    with pytest.raises(ConfigError, match=r"cannot be read"):
        import_config_command(["verl", str(tmp_path / "nowhere.yaml")])
    for value, words in (
        ("data.train_batch_size=many", r"is 'many': give a number"),
        ("trainer.critic_warmup=[x]", "kind"),
    ):
        with pytest.raises(ConfigError, match=words):
            import_config_command(["verl", "--", value])
    for text in ("model:\n  num_steps: 3\n", "just words\n", "a: [\n", ""):
        other.write_text(text)
        assert import_config_command(["verl", str(other)]) == 1
    assert "is no configuration of verl" in capsys.readouterr().err


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "verl.yaml").write_text("actor_rollout_ref:\n  rollout:\n    n: 5\n")
    (folder / "trl.yaml").write_text("num_generations: 8\n")
    key = ["--data.train_batch_size", "4"]
    jobs = {
        "verl": [*SMALL, "-c", str(folder / "verl.yaml")],
        "trl": [*SMALL, "-c", str(folder / "trl.yaml")],
        "option": [*SMALL, *key],
        "reason": [*SMALL, "--trainer.balance_batch", "true"],
        "typo": [*SMALL, "--data.shufle", "true"],
        "blocked": ["--block", "migrate", *SMALL, *key],
    }
    return Runs({name: Job(words) for name, words in jobs.items()}, folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("verl", "'actor_rollout_ref.rollout.n'. It is verl's, and here model.batch.group_size."),
        ("trl", "'num_generations'. It is TRL's, and here model.batch.group_size."),
        ("option", "It is verl's, and here model.batch.prompts_per_step."),
        ("reason", "without a counterpart: sets itself: each GPU gets the same number of tokens."),
        ("typo", "Did you mean 'data.shuffle'?"),
        ("blocked", "there is no key 'data.train_batch_size'. "),
    ],
)
def test_a_key_of_another_framework_is_refused_with_ours(refused: Runs, name: str, words: str) -> None:
    message = refused.ended(name, 2).message
    assert words in message
    assert ("verl's" in message or "TRL's" in message) == (name not in ("typo", "blocked"))
