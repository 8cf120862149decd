"""Versions of an engine's library: those that are known, others, and libraries that are missing or broken."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import packaging
import pytest
from packaging.version import Version
from rlplug_engines.colocated import SupportedVersions, declared_fields, package_folder

from rlplug.errors import ConfigError

VERSIONS = SupportedVersions("Engine", "rlplug-engine", Version("0.26"), Version("0.33"), "pip install engine")


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.32.0+cpu", "0.32.3.dev1", "0.26.0rc2"])
def test_versions_that_are_known(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "engine", SimpleNamespace(__version__=version))  # type: ignore[arg-type]
    assert str(VERSIONS.require_module("engine")) == version


@pytest.mark.parametrize("version", ["0.25.3", "0.33.0", "1.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError) as error:
        VERSIONS.require(Version(version))
    assert str(error.value) == (
        f"Engine {version} is installed, and rlplug-engine knows 0.26 up to, not including, 0.33: pip install engine."
    )
    with pytest.raises(ConfigError, match=rf"Engine {version} runs at http://host, and .* not including, 0\.33\.$"):
        VERSIONS.require(Version(version), "at http://host")


def test_missing_library_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine", None)  # type: ignore[arg-type]
    message = r"model\.rollout needs Engine, which is not installed: pip install engine\."
    with pytest.raises(ConfigError, match=message):
        VERSIONS.require_module("engine")
    with pytest.raises(ConfigError, match=message):
        VERSIONS.require_distribution("rlplug-no-such-engine")


def test_library_that_lacks_another_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_engine.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be imported \(No module named 'no_such_module'\): pip install"):
        VERSIONS.require_module("broken_engine")


def test_distribution_is_asked_for_its_version() -> None:
    version = Version(packaging.__version__)
    known = SupportedVersions("packaging", "rlplug", version, Version(f"{version.major + 1}"), "pip install packaging")
    assert known.require_distribution("rlplug-no-such-engine", "packaging") == version


def test_fields_of_a_librarys_classes_are_read_without_its_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "unread_engine").mkdir()
    (tmp_path / "unread_engine/__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("unread_engine") == tmp_path / "unread_engine"
    source = "class A:\n    x: int\n    y: int = 3\n    z = 4\n    def f(self): w: int = 1\nclass B(A):\n    v: int"
    assert declared_fields(source) == {"A": {"x", "y"}, "B": {"v"}}
