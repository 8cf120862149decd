"""Distributions of the repository: found from their folders, of one version, and published as what was built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import build_distributions
import pytest
import set_version
from command_line import ROOT
from distributions import Distribution, all_distributions, plugin_distributions
from packaging.requirements import Requirement
from packaging.version import Version
from repository_links import absolute_links

NEW = """\
[project]
name = "rlplug-scratch"
version = "0.1.0"
dependencies = ["rlplug>=0.1,<0.2"]

[project.entry-points."rlplug.plugins"]
scratch = "rlplug_scratch.plugin"
"""
HAND_WRITTEN = (
    *("Makefile", "pyproject.toml", "conftest.py", ".pre-commit-config.yaml", ".ci/run"),
    *("scripts/*.py", "rlplug/**/*.py", ".github/**/*.yml", "docs/conf.py", "docs/api/*.rst"),
    *("tests/integration/conftest.py", "tests/integration/wheel_environment.py", "tests/integration/documentation.py"),
)
ENGINE_ENVIRONMENT = "requirements-cpu.txt"
"""An engine whose folder has this file has an environment of its own, and targets of its own in the Makefile."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that find plugins, and one plugin more: nothing of it but its folder is new."""
    root = tmp_path / "repository"
    root.mkdir()
    for name in ("Makefile", "pyproject.toml", "conftest.py", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("images"))
    for distribution in plugin_distributions():
        (root / "plugins" / distribution.folder.name).mkdir(parents=True)
        shutil.copy(distribution.folder / "pyproject.toml", root / "plugins" / distribution.folder.name)
    scratch = root / "plugins/scratch"
    (scratch / "src/rlplug_scratch").mkdir(parents=True)
    (scratch / "src/rlplug_scratch/__init__.py").touch()
    (scratch / "tests").mkdir()
    (scratch / "pyproject.toml").write_text(NEW)
    (scratch / "tests/scratch_cases.py").write_text("CASES = [1, 2]\n")
    (scratch / "tests/test_scratch.py").write_text(
        "import scratch_cases\n\n\ndef test_it():\n    assert scratch_cases\n"
    )
    return root


def test_a_new_folder_is_a_plugin_of_the_repository(copy: Path) -> None:
    found = {distribution.name: distribution for distribution in all_distributions(copy)}

    assert found.keys() - {d.name for d in all_distributions()} == {"rlplug-scratch"}
    assert found["rlplug-scratch"].plugins == ["scratch"]
    assert found["rlplug-scratch"].packages == ["rlplug_scratch"]


def test_a_new_folder_is_installed_and_linted_by_make(copy: Path) -> None:
    command = ["make", "--always-make", "--dry-run", "lint"]
    shown = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=True).stdout

    assert re.search(r"pip install .*--editable plugins/scratch\b", shown)
    assert re.search(r"for plugin in .*plugins/scratch\b", shown)


def test_tests_of_a_new_folder_are_run(copy: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-config"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("pattern", HAND_WRITTEN)
def test_nothing_names_the_plugins_by_hand(pattern: str) -> None:
    names = [f"plugins/{d.folder.name}" for d in plugin_distributions() if not (d.folder / ENGINE_ENVIRONMENT).exists()]
    names += [name for d in plugin_distributions() for name in (d.name, *d.packages)]
    called = re.compile(rf"\b({'|'.join(names)})\b")
    files = [file for file in ROOT.glob(pattern) if file.is_file()]

    assert files
    assert not [(file.name, found[0]) for file in files if (found := called.search(file.read_text()))]


def test_all_distributions_have_the_version_of_the_core() -> None:
    core, *plugins = all_distributions()

    assert {distribution.version for distribution in plugins} == {core.version}
    for plugin in plugins:
        (needed,) = [r for r in map(Requirement, plugin.project["dependencies"]) if r.name == "rlplug"]
        assert core.version in needed.specifier
    assert not dict(set_version.changed_files(Version(core.version))), "run scripts/set_version.py"


def test_a_new_version_reaches_every_distribution(copy: Path) -> None:
    changed = dict(set_version.changed_files(Version("1.2.3"), copy))
    for file, text in changed.items():
        file.write_text(text)

    assert {file for file in changed if file.suffix == ".toml"} == {
        distribution.folder / "pyproject.toml" for distribution in all_distributions(copy)
    }
    for distribution in all_distributions(copy):
        assert distribution.version == "1.2.3"
        own = [r for r in distribution.project["dependencies"] if r.startswith("rlplug")]
        assert own == ([] if distribution.name == "rlplug" else ["rlplug>=1.2,<2"])
    # the plugin that the page has its reader write keeps a version of its own
    page = (copy / "docs/writing-a-plugin.md").read_text()
    assert "rlplug loaded (rlplug 1.2.3, hook API" in page
    assert 'version = "0.1.0"' in page
    assert 'dependencies = ["rlplug>=1.2,<2"]' in page


@pytest.mark.parametrize(
    ("version", "expected"), [("0.1.0", ">=0.1,<0.2"), ("0.9.2", ">=0.9,<0.10"), ("2.3.1", ">=2.3,<3")]
)
def test_range_of_a_version(version: str, expected: str) -> None:
    assert set_version.compatible_range(Version(version)) == expected


@pytest.mark.parametrize("distribution", all_distributions(), ids=lambda distribution: distribution.name)
def test_links_of_a_published_readme_lead_into_the_repository(distribution: Distribution) -> None:
    text = absolute_links((distribution.folder / "README.md").read_text(), distribution.folder, "v0.1.0")
    links = re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))

    assert links
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def test_links_of_a_page_stay_where_the_site_has_the_page() -> None:
    page = "[a](memory.md#table), [b](../rlplug/ops.py), [c](#here), [d](../configs), [e](images/report.png)\n"
    fence = "```text\n[f](../rlplug/ops.py)\n```\n"
    root = "https://github.com/rlplug/rlplug"
    docs = ROOT / "docs"

    shown = absolute_links(page + fence, docs, stays=lambda path: path == docs / "memory.md")
    assert shown == (
        f"[a](memory.md#table), [b]({root}/blob/main/rlplug/ops.py), [c](#here), [d]({root}/tree/main/configs), "
        f"[e]({root}/raw/main/docs/images/report.png)\n{fence}"
    )
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        absolute_links("[a](nowhere.md)", docs)


def test_nothing_is_built_beside_older_files(tmp_path: Path) -> None:
    (tmp_path / "rlplug-0.0.1.tar.gz").touch()

    with pytest.raises(SystemExit, match="is not empty"):
        build_distributions.build(all_distributions(), tmp_path)
