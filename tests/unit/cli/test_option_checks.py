"""Seeds follow one key, and every number of the core has a range."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlplug.cli.configuration.option_checks import LARGEST, all_options, range_at
from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.errors import ConfigError
from rlplug.plugin_manager import plugins

ROOT = Path(__file__).parents[3]
FIT = ["fit", "-c", "configs/quickstart.yaml", "-c", "configs/algo/ppo.yaml"]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read paths of the configuration as at the root, know the plugins' classes, and leave ``sys.argv`` as it was."""
    plugins()
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.setattr("sys.argv", ["rlplug"])


def seeds(*options: str) -> list[int]:
    models = ("--model.reference.path", "tests/model", "--model.critic.trunk.path", "tests/model")
    cli: Any = read_command(ConfiguredCLI, [*FIT, *models, *options])
    config = cli.model.config
    reference, trunk = config.reference.seed, config.critic.trunk.seed
    return [config.seed, config.policy.seed, reference, config.critic.seed, trunk, cli.datamodule.seed]


def test_one_key_sets_every_seed() -> None:
    """Alone catches a seed of rollouts, weights or data that ``seed_everything`` does not reach."""
    assert seeds() == [0, 0, 0, 0, 0, 0]
    assert seeds("--seed_everything", "7") == [7, 7, 7, 7, 7, 7]
    assert seeds("--seed_everything", "7", "--data.seed", "3", "--model.critic.seed", "5") == [7, 7, 7, 5, 7, 3]


def test_the_saved_configuration_lets_another_run_take_another_seed() -> None:
    cli: Any = read_command(ConfiguredCLI, [*FIT, "--seed_everything", "7"])

    assert "seed_everything: 7" in cli.config_yaml
    assert "seed: 7" not in cli.config_yaml


@pytest.mark.parametrize("seed", ["-1", "4294967296", "false", "null", "1.5", "nan"])
def test_a_seed_that_is_none_is_refused(seed: str) -> None:
    with pytest.raises(ConfigError, match="seed_everything"):
        seeds("--seed_everything", seed)


def test_every_number_of_the_core_has_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone catches a new option whose -1 or 1e9 nobody decided."""
    without: list[str] = []

    original = ConfiguredCLI.before_instantiate_classes

    def look(cli: Any) -> None:
        original(cli)
        for name, value, hint in all_options(cli.config[cli.subcommand]):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_ours = not name.startswith("trainer.") or name.startswith("trainer.strategy.")
            if is_number and is_ours and range_at(name, hint) is LARGEST:
                without.append(name)

    monkeypatch.setattr(ConfiguredCLI, "before_instantiate_classes", look)
    read_command(ConfiguredCLI, FIT)

    assert not without


@pytest.mark.parametrize("key", ["model.lora.load_in_4bit", "model.policy.quantization_config.bits"])
def test_weights_in_four_bits_are_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match=r"QLoRA\) are not built.*docs/lora\.md"):
        read_command(ConfiguredCLI, [*FIT, f"--{key}", "4"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.train.sources.b.weight=-1", "sources.b.weight is -1.0: give a number from 0 up to 1e+09"),
        ("--data.train.sources.b.source.limit=0", "sources.b.source.init_args.limit is 0: give a number from 1 up to"),
        ("--model.validation.sampling.top_p=0", "model.validation.sampling.top_p is 0.0: give a number above 0 and"),
        ("--model.lora.rank=0", "model.lora.rank is 0: give a number from 1 up to 100,000"),
        ("--model.sampling.extra={}", None),
    ],
)
def test_a_range_on_a_field_holds_wherever_its_block_is(option: str, message: str | None) -> None:
    """Alone catches a block in a mapping, behind null or in another class, whose numbers only its constructor checks,
    with a message that does not say where it is."""
    source = "{source: {class_path: FileSource, init_args: {path: examples/quickstart/train.jsonl}}}"
    mixture = f"--data.train={{class_path: MixtureSource, init_args: {{sources: {{a: {source}, b: {source}}}}}}}"
    if message is None:
        read_command(ConfiguredCLI, [*FIT, mixture, option])
        return
    with pytest.raises(ConfigError) as error:
        read_command(ConfiguredCLI, [*FIT, mixture, option])
    assert message in str(error.value)
