"""``rlplug new-plugin``: names, files, and what it refuses. Plugins are used in ``integration/test_new_plugin.py``."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import set_version
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rlplug_devkit.new_plugin import new_plugin_command
from rlplug_devkit.new_plugin.kinds import KINDS
from rlplug_devkit.new_plugin.rendering import LONGEST_NAME, compatible_range, names_of, rendered_files, write_files

from rlplug.errors import ConfigError

ROOT = Path(__file__).parents[3]
LONG = "-".join(["quite", "a", "long", "name", "for", "a", "plugin", "of", "x"])


@pytest.mark.parametrize("given", ["short-answers", "rlplug-short-answers"])
def test_all_names_follow_from_one(given: str) -> None:
    names = names_of(given)

    assert vars(names) == {
        "name": "short-answers",
        "distribution": "rlplug-short-answers",
        "module": "rlplug_short_answers",
        "class_name": "ShortAnswers",
        "variable": "SHORT_ANSWERS",
    }


@pytest.mark.parametrize(
    "given", ["", "rlplug-", "Short", "a_b", "a--b", "-a", "9a", "a-9", "../a", "a b", "none", "x" * (LONGEST_NAME + 1)]
)
def test_a_name_that_does_not_fit_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="new-plugin: the name is"):
        names_of(given)


def test_every_kind_is_formatted_and_has_no_lint(tmp_path: Path) -> None:
    """With the plugin's own settings of ruff, whatever the length of its name."""
    pytest.importorskip("ruff")
    for name in ("x", LONG):
        for kind in KINDS:
            write_files(rendered_files(names_of(name), kind), tmp_path / name / kind)
    for command in (["check"], ["format", "--check", "--diff"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_has_all_that_a_repository_needs(kind: str) -> None:
    files = rendered_files(names_of("my-part"), kind)
    source = "src/rlplug_my_part"

    assert {".gitignore", "README.md", "pyproject.toml", "run.yaml", f"{source}/py.typed", f"{source}/plugin.py"} <= {
        *files
    }
    assert sum(path.startswith("tests/test_") for path in files) == 2
    assert files["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert not [path for path, text in files.items() if "MODULE" in path or "<<" in text]
    assert isinstance(yaml.safe_load(files["run.yaml"]), dict)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["entry-points"]["rlplug.plugins"] == {"my-part": "rlplug_my_part.plugin"}
    code = [text for path, text in files.items() if path.startswith(source) and not path.endswith("plugin.py")]
    assert all(len(text.splitlines()) <= 150 for text in code)


def test_the_workflow_tests_the_oldest_and_the_newest_rlplug() -> None:
    files = rendered_files(names_of("my-part"), "reward")
    (needed,) = tomllib.loads(files["pyproject.toml"])["project"]["dependencies"]
    claimed = SpecifierSet(needed.removeprefix("rlplug"))
    matrix = yaml.safe_load(files[".github/workflows/test.yml"])["jobs"]["test"]["strategy"]["matrix"]["include"]
    oldest, newest = (SpecifierSet(row["rlplug"]) for row in matrix)

    (exact,) = oldest
    assert exact.operator == "=="
    assert exact.version in claimed
    assert exact.version.startswith(next(part.version for part in claimed if part.operator == ">="))
    assert newest == claimed


@pytest.mark.parametrize("version", ["0.1.0", "0.9.2", "2.3.1"])
def test_the_range_is_that_of_the_projects_own_plugins(version: str) -> None:
    assert compatible_range(Version(version)) == set_version.compatible_range(Version(version))


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "here"
    arguments = ["my-part", "--kind", "reward", "--folder", str(folder)]
    new_plugin_command(arguments)
    new_plugin_command(arguments)  # the same text again changes nothing
    assert f"wrote a reward into {folder}" in capsys.readouterr().out

    (folder / "run.yaml").write_text("mine: true\n")
    (folder / "README.md").unlink()
    with pytest.raises(ConfigError, match=r"run\.yaml exists with another text"):
        new_plugin_command(arguments)
    assert (folder / "run.yaml").read_text() == "mine: true\n"
    assert not (folder / "README.md").exists()  # all or nothing


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="cannot write"):
        new_plugin_command(["my-part", "--kind", "reward", "--folder", str(tmp_path / "file/inside")])


def test_a_class_cannot_hide_what_its_file_uses() -> None:
    with pytest.raises(ConfigError, match=r"would be Block, a name that src/rlplug_block/trainer\.py uses"):
        rendered_files(names_of("block"), "trainer")
