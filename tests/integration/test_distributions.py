"""Distributions of the repository: found from their folders, of one version, and published as what was built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import TypeAlias

import build_distributions
import pytest
import set_version
import try_distributions
from command_line import ROOT
from distributions import Distribution, all_distributions, plugin_distributions
from empty_environment import EmptyEnvironment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from repository_links import absolute_links
from wheel_environment import PROBE
from wheel_imports import imported, package_folders, providers, sources

from rlplug.hookspecs import SINCE

Attempt: TypeAlias = Callable[[EmptyEnvironment], None]

NEW = """\
[project]
name = "rlplug-scratch"
version = "0.1.0"
dependencies = ["rlplug>=0.1,<0.2"]

[project.entry-points."rlplug.plugins"]
scratch = "rlplug_scratch.plugin"
"""
HAND_WRITTEN = (
    *("Makefile", "conftest.py", ".pre-commit-config.yaml", ".ci/run", ".github/workflows/*.yml", "docs/conf.py"),
    *("scripts/*distributions.py", "scripts/empty_environment.py", "scripts/set_version.py"),
    *("tests/integration/conftest.py", "tests/integration/wheel_environment.py"),
)
"""Files that find the distributions by their folders."""
ENGINE_ENVIRONMENT = "requirements-cpu.txt"
"""An engine whose folder has this file has an environment of its own, and targets of its own in the Makefile."""
COME_WITH = {
    "huggingface_hub": "transformers",
    "jinja2": "torch",
    "tokenizers": "transformers",
    "markupsafe": "jinja2",
    "triton": "torch",
    "flash_attn": "flash-attn-4",
    "pytest": "rlplug-devkit",
}
"""Modules that a declared distribution brings under another name, or requires itself."""
NOT_DECLARED = {
    "wandb": "a logger of Lightning's asks for it",
    "tensorrt_llm": "NVIDIA's container has it",
    "code_stand_ins": "it lies beside the program that imports it",
    "code_values": "it lies beside the program that imports it",
    "tensorboard": "an extra of rlplug",
    "sandbox_files": "it lies beside the program that imports it",
    "sandbox_limits": "it lies beside the program that imports it",
    "sandbox_isolation": "it lies beside the program that imports it",
}
LATE_MODULES = {"rlplug-watch": {"prometheus_client"}, "rlplug-rollout-trtllm": {"rlplug_devkit"}}
"""What modules import that are themselves imported once it is known to be there."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that find plugins, and one plugin more: nothing of it but its folder is new."""
    root = tmp_path / "repository"
    root.mkdir()
    for name in ("Makefile", "pyproject.toml", "conftest.py", "README.md", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    (root / "tests").mkdir()
    (plugins,) = re.findall(r"^pytest_plugins = (.*)$", (root / "conftest.py").read_text(), re.M)
    for name in re.findall(r"\w+", plugins):  # no test of the copy uses what they bring
        (root / f"tests/{name}.py").touch()
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
    assert re.search(r"/mypy rlplug .*plugins/scratch/src\b", shown)


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
    texts = {
        file.name: re.sub(r"(?m)^QUICKSTART_PLUGINS .*", "", file.read_text()) for file in files
    }  # a choice of some
    assert not [(name, found[0]) for name, text in texts.items() if (found := called.search(text))]


# ---- metadata -----------------------------------------------------------------------------------------------------


def requirements(distribution: Distribution, *, extras: bool) -> list[Requirement]:
    """Return what a distribution requires, with the requirements of its extras or without."""
    texts = list(distribution.project.get("dependencies", ()))
    if extras:
        texts += [text for each in distribution.project.get("optional-dependencies", {}).values() for text in each]
    return [Requirement(text) for text in texts]


def names(distribution: Distribution, *, extras: bool) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements(distribution, extras=extras)}


def test_all_distributions_have_the_version_of_the_core() -> None:
    core, *plugins = all_distributions()

    assert {distribution.version for distribution in plugins} == {core.version}
    assert not dict(set_version.changed_files(Version(core.version))), "run scripts/set_version.py"


@pytest.mark.parametrize("distribution", all_distributions(), ids=lambda distribution: distribution.name)
def test_ranges_of_our_own_distributions_are_those_of_the_version(distribution: Distribution) -> None:
    core = all_distributions()[0]
    others = {each.name for each in all_distributions()} - {distribution.name}
    ranges = {r.specifier for r in requirements(distribution, extras=True) if r.name in others}

    assert ranges == {SpecifierSet(set_version.compatible_range(Version(core.version)))}
    assert core.name in names(distribution, extras=False) or distribution == core


def test_everything_but_engines_and_trainers_comes_with_full() -> None:
    """Those two need a library of their own, which needs a GPU or other versions."""
    by_name = {distribution.name: distribution for distribution in all_distributions()}
    waiting = [Requirement(text) for text in by_name["rlplug"].project["optional-dependencies"]["full"]]
    found = {"rlplug"}
    while waiting:
        requirement = waiting.pop()
        if requirement.name in by_name.keys() - found:
            found.add(requirement.name)
            waiting += requirements(by_name[requirement.name], extras=False)

    left_out = sorted(by_name[name].folder.name for name in by_name.keys() - found)
    assert [name for name in left_out if not name.startswith(("rollout_", "trainer_"))] == []


@pytest.mark.parametrize("distribution", all_distributions(), ids=lambda distribution: distribution.name)
def test_what_is_imported_is_required(distribution: Distribution) -> None:
    core = all_distributions()[0]
    required = names(distribution, extras=False) | names(core, extras=False)
    optional = required | names(distribution, extras=True)
    late = LATE_MODULES.get(distribution.name, set())
    at_start, later = imported(distribution)

    def missing(modules: set[str], declared: set[str]) -> list[str]:
        return sorted(m for m in modules - NOT_DECLARED.keys() if not {*providers(m), COME_WITH.get(m, m)} & declared)

    assert missing(at_start - late, required) == []
    assert missing(later | late, optional) == []


def test_the_quickstart_installs_what_its_plugins_require() -> None:
    """Alone catches a requirement that pip looks for on an index, in a fresh clone, where it is not yet."""
    (listed,) = re.findall(r"(?m)^QUICKSTART_PLUGINS := (.*)$", (ROOT / "Makefile").read_text())
    ours = {f"plugins/{plugin.folder.name}": plugin for plugin in plugin_distributions()}
    names_of_ours = {plugin.name: folder for folder, plugin in ours.items()}
    required = {name for folder in listed.split() for name in names(ours[folder], extras=False)}
    assert {names_of_ours[name] for name in required & names_of_ours.keys()} <= set(listed.split())


@pytest.mark.parametrize("distribution", plugin_distributions(), ids=lambda distribution: distribution.name)
def test_nothing_is_required_in_vain_or_twice(distribution: Distribution) -> None:
    """What the core requires comes with it, in its range; and what a wheel requires of ours, it imports."""
    core, *plugins = all_distributions()
    required = names(distribution, extras=False)
    packages = {plugin.name: {*plugin.packages} for plugin in plugins}

    assert required & names(core, extras=False) == set()
    assert [name for name in required & packages.keys() if not packages[name] & imported(distribution)[0]] == []


@pytest.mark.parametrize("distribution", all_distributions(), ids=lambda distribution: distribution.name)
def test_a_wheel_has_all_files_of_its_packages(distribution: Distribution) -> None:
    patterns = tomllib.loads((distribution.folder / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for folder in package_folders(distribution):
        data = {name for pattern in patterns[folder.name] for name in glob(pattern, root_dir=folder, recursive=True)}
        files = {file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
        modules = {file for file in files if file.suffix == ".py"}

        assert sorted(str(file) for file in files - modules if str(file.relative_to(folder)) not in data) == []
        assert [file for file in modules if not (file.parent / "__init__.py").is_file()] == []
        assert "py.typed" in data


@pytest.mark.parametrize("distribution", all_distributions(), ids=lambda distribution: distribution.name)
def test_entry_points_lead_to_modules_and_functions(distribution: Distribution) -> None:
    modules = {
        ".".join(file.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for folder in package_folders(distribution)
        for file in folder.rglob("*.py")
    }
    for group in distribution.project.get("entry-points", {}).values():
        for value in group.values():
            module, _, function = value.partition(":")
            assert module in modules, value
            assert not function or re.search(rf"^def {function}\(", modules[module].read_text(), re.M), value


def test_extras_that_messages_name_are_there() -> None:
    extras = {each.name: each.project.get("optional-dependencies", {}).keys() for each in all_distributions()}
    wrong = [
        f"{file.relative_to(ROOT)}: {name}[{extra}]"
        for distribution in all_distributions()
        for file in sources(distribution)
        for name, named in re.findall(r"\b(rlplug(?:-[a-z]+)*)\[([a-z,-]+)\]", file.read_text())
        for extra in named.split(",")
        if extra not in extras.get(name, ())
    ]
    assert wrong == []


def test_the_probe_implements_every_hook() -> None:
    """It shows in test_plugin_wheel.py what each hook does in a run of wheels."""
    (module,) = [file for file in sources(PROBE) if file.name == "plugin.py"]

    assert sorted(re.findall(r"^def (rlplug_\w+)", module.read_text(), re.M)) == sorted(SINCE)


# ---- version ------------------------------------------------------------------------------------------------------


def test_a_new_version_reaches_every_distribution(copy: Path) -> None:
    changed = dict(set_version.changed_files(Version("1.2.3"), copy))
    for file, text in changed.items():
        file.write_text(text)

    assert {file for file in changed if file.suffix == ".toml"} == {
        distribution.folder / "pyproject.toml" for distribution in all_distributions(copy)
    }
    for distribution in all_distributions(copy):
        assert distribution.version == "1.2.3"
        own = [r for r in requirements(distribution, extras=True) if r.name.startswith("rlplug")]
        assert {str(r.specifier) for r in own if r.name != distribution.name} == {"<2,>=1.2"}
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


# ---- use of the wheels --------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("attempt", [try_distributions.try_core, try_distributions.try_full])
def test_wheels_work_in_an_empty_environment(attempt: Attempt, dist: Path, tmp_path: Path) -> None:
    attempt(EmptyEnvironment.make(tmp_path, dist))
