"""Seeds follow one key, and every number of the core has a range."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.cli.option_checks import LARGEST, SEED_KEYS, _leaves, _range_of, _top_level
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
    cli: Any = read_command(ConfiguredCLI, [*FIT, *options])
    config = cli.model.config
    return [config.seed, config.policy.seed, config.critic.seed, cli.datamodule.seed]


def test_one_key_sets_every_seed() -> None:
    """Alone catches a seed of rollouts, weights or data that ``seed_everything`` does not reach."""
    assert seeds() == [0, 0, 0, 0]
    assert seeds("--seed_everything", "7") == [7, 7, 7, 7]
    assert seeds("--seed_everything", "7", "--data.seed", "3", "--model.critic.seed", "5") == [7, 7, 5, 3]


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
        config, parser = cli.config[cli.subcommand], cli._parser(cli.subcommand)
        for key, hint in _top_level(parser):
            for name, value, _ in _leaves(key, config.get(key), hint, True):
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                is_ours = not name.startswith("trainer.") or name.startswith("trainer.strategy.")
                if is_number and is_ours and _range_of(name) is LARGEST:
                    without.append(name)

    monkeypatch.setattr(ConfiguredCLI, "before_instantiate_classes", look)
    read_command(ConfiguredCLI, FIT)

    assert not without
    assert {"model.seed", "data.seed"} <= set(SEED_KEYS)


@pytest.mark.parametrize("key", ["model.lora.load_in_4bit", "model.policy.quantization_config.bits"])
def test_weights_in_four_bits_are_refused_with_the_reason(key: str) -> None:
    with pytest.raises(ConfigError, match=r"QLoRA\) are not built.*docs/lora\.md"):
        read_command(ConfiguredCLI, [*FIT, f"--{key}", "4"])
