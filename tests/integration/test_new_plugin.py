"""Plugins of ``rlplug new-plugin`` as their authors use them: built, installed, listed, tested, trained with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from build_distributions import build
from distributions import Distribution, all_distributions
from empty_environment import EmptyEnvironment
from rlplug_devkit.new_plugin import new_plugin_command
from rlplug_devkit.new_plugin.kinds import KINDS
from rlplug_devkit.new_plugin.rendering import names_of, rendered_files, write_files

from rlplug.plugin_manager import PluginManager

ROOT = Path(__file__).parents[2]
NAME = "my-part"
REGISTERED = {
    "engine": "rollouts/MyPart",
    "algorithm": "algorithms/MyPart",
    "reward": "rewards/MyPart",
    "environment": "environments/MyPart",
    "optimization": "optimizations/MyPart",
    "trainer": "trainers/MyPart",
    "hooks": "",
}


def wheel_of(folder: Path) -> Path:
    alone = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *alone, "--wheel-dir", folder / "dist", folder], check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def test_a_reward_is_built_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest way through; every night all kinds go all the way."""
    new_plugin_command([NAME, "--kind", "reward", "--folder", str(tmp_path / "rlplug-my-part")])
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel_of(tmp_path / "rlplug-my-part")) as archive:
        archive.extractall(site)  # what pip does with a pure wheel
    assert (site / "rlplug_my_part/py.typed").exists()
    monkeypatch.syspath_prepend(str(site))

    (record,) = [record for record in PluginManager(strict=False).records if record.name == NAME]
    assert (record.state, record.registers) == ("loaded", ["rewards/MyPart"]), record


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the wheels of all distributions."""
    folder = tmp_path_factory.mktemp("wheels") / "dist"
    build(all_distributions(), folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_of_each_kind_passes_its_tests_in_an_environment_of_wheels(
    kind: str, dist: Path, tmp_path: Path
) -> None:
    """The developer kit's wheel has the templates; the plugin's two steps of training are one of its tests."""
    environment = EmptyEnvironment.make(tmp_path / "environment", shutil.copytree(dist, tmp_path / "dist"))
    environment.install("rlplug-devkit")
    made = environment.run("rlplug", "new-plugin", NAME, "--kind", kind)
    assert made.returncode == 0, made.stderr
    folder = environment.folder / "rlplug-my-part"
    assert Distribution(folder).plugins == [NAME]
    shutil.copy(wheel_of(folder), environment.dist)
    environment.install("rlplug-my-part[test]")

    listed = environment.run("rlplug", "plugins", "--check", "--json")
    (record,) = [record for record in json.loads(listed.stdout) if record["name"] == NAME]
    assert (record["state"], record["registers"]) == ("loaded", [REGISTERED[kind]] if REGISTERED[kind] else []), record

    tested = environment.run("python", "-m", "pytest", "-p", "no:cacheprovider", str(folder))
    assert tested.returncode == 0, tested.stdout[-10_000:] + tested.stderr


@pytest.mark.nightly
def test_plugins_of_all_kinds_have_types(tmp_path: Path) -> None:
    for kind in KINDS:
        write_files(rendered_files(names_of(NAME), kind), tmp_path / kind)
        mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")]
        mypy += ["--follow-imports", "silent", "src"]  # rlplug has options of its own
        variables = {**os.environ, "MYPYPATH": f"src{os.pathsep}{ROOT}"}
        done = subprocess.run(mypy, cwd=tmp_path / kind, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{kind}\n{done.stdout}"
