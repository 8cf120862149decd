"""``${NAME}`` in YAML: what is read, what is refused, and what a run saves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlplug.cli.configuration.config_files import check_config_file, load_yaml
from rlplug.cli.configuration.environment_values import resolve_variables
from rlplug.cli.lightning_cli import ConfiguredCLI, read_command
from rlplug.errors import ConfigError
from rlplug.plugin_manager import plugins

ROOT = Path(__file__).parents[3]
INJECTED = "{class_path: FileSource, init_args: {path: /etc/passwd}}"
CONFIG = """
model:
  num_steps: ${STEPS}
  sampling: {temperature: "${TEMPERATURE:-0.5}"}
data:
  too_long: ${MODE:-filter}
  system_prompt: "${INJECTED} $${x} $$y$$"
  train:
    class_path: ReasoningGymSource
    init_args: {task: "${NUMBER}", config: {min_terms: "${STEPS}", text: "${LIST}"}}
run: {dir: "${SECRET}/runs"}
"""


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["rlplug"])
    monkeypatch.delenv("UNSET", raising=False)
    values = {"STEPS": "7", "NUMBER": "12", "SECRET": "${STEPS}secret", "EMPTY": "", "LIST": "[1, 2]"}
    for name, value in {**values, "INJECTED": INJECTED}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a/${NUMBER}/b", "a/12/b"),
        ("${EMPTY}", ""),
        ("${EMPTY:-other}${UNSET:-}", "other"),
        ("${UNSET:-http://a:8000/{x}", "http://a:8000/{x"),
        ("$${NUMBER} $$ $NUMBER", "${NUMBER} $$ $NUMBER"),
        ("${SECRET}", "${STEPS}secret"),  # a value is not read again
    ],
)
def test_references_and_escapes(text: str, value: str) -> None:
    assert resolve_variables({"a": [text]}) == {"a": [value]}


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${UNSET}", r"data.train\[0\]: the environment variable UNSET is not set: .* \$\{UNSET:-default\}"),
        ("${a b}", r"data.train\[0\]: '\$\{a b\}' is no reference .* \$\$\{ for a literal"),
        ("x ${UNSET", "is no reference"),
        ("${UNSET-x}", "is no reference"),
        ("${}", "is no reference"),
    ],
)
def test_what_cannot_be_resolved_names_key_and_variable(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump({"data": {"train": [text]}}))
    with pytest.raises(ConfigError, match=message):
        check_config_file(file)


@pytest.mark.usefixtures("variables")
def test_values_are_data_with_the_types_of_their_options_and_are_saved_as_references(tmp_path: Path) -> None:
    """Alone catches a value that becomes structure, a number that stays text, and a secret in the run folder."""
    file = tmp_path / "a.yaml"
    file.write_text(CONFIG)
    options = ["fit", "-c", "configs/quickstart.yaml"]
    cli: Any = read_command(ConfiguredCLI, [*options, "-c", str(file)])

    source = cli.datamodule.train
    assert (cli.model.config.num_steps, cli.model.config.sampling.temperature) == (7, 0.5)
    assert (source.task, type(source.task)) == ("12", str), "msgspec takes no subclass of str"
    assert source.config == {"min_terms": 7, "text": "[1, 2]"}
    assert cli.datamodule.system_prompt == f"{INJECTED} ${{x}} $$y$$"
    saved = yaml.safe_load(cli.config_yaml)
    assert saved["run"]["dir"] == "${SECRET}/runs"
    assert saved["data"]["too_long"] == "${MODE:-filter}"
    assert saved["data"]["system_prompt"] == "${INJECTED} $${x} $$y$$"
    assert saved["model"]["num_steps"] == 7
    assert not any(value in cli.config_yaml for value in ("STEPS}secret", "passwd"))

    (tmp_path / "saved.yaml").write_text(cli.config_yaml)
    again: Any = read_command(ConfiguredCLI, ["fit", "-c", str(tmp_path / "saved.yaml")])
    assert again.config_yaml == cli.config_yaml
    assert again.datamodule.system_prompt == cli.datamodule.system_prompt
    file.write_text("model: {num_steps: '${SECRET}'}")
    with pytest.raises(ConfigError, match=r"^model\.num_steps is \${STEPS}secret: give a whole number"):
        read_command(ConfiguredCLI, [*options, "-c", str(file)])
    file.write_text("model: {rewards: ['${INJECTED}']}")
    with pytest.raises(ConfigError, match=r"model\.rewards"):
        read_command(ConfiguredCLI, [*options, "-c", str(file)])


@pytest.mark.usefixtures("variables")
def test_a_resolved_text_stays_one_through_copies_and_second_readings() -> None:
    text = copy.deepcopy(resolve_variables("${INJECTED}"))
    assert load_yaml(text) == INJECTED
    assert yaml.safe_dump([text]) == "- ${INJECTED}\n"
