"""Registered classes: names, owners, and what an unknown or taken name is told."""

from __future__ import annotations

import sys

import pytest
from rlplug_rewards.text import ExactMatch, RegexFormat

from rlplug.errors import ConfigError, PluginError
from rlplug.interfaces import Effect, Optimization, Reward
from rlplug.plugin_names import plugin_index
from rlplug.registry import KINDS, Registry
from rlplug.rollout.hf_engine import HFRollout


class Fast(Optimization):
    def effects(self) -> list[Effect]:
        return []


@pytest.fixture
def registry() -> Registry:
    """Two rewards of the core and one of a plugin, which also has an engine."""
    registry = Registry()
    registry.add("rewards", RegexFormat)
    registry.set_owner("acme-rewards")
    registry.add("rewards", ExactMatch)
    registry.add("rollouts", HFRollout)
    return registry


def test_class_is_found_by_its_name(registry):
    assert registry.get("rewards", "ExactMatch") is ExactMatch
    assert registry.names("rewards") == ["ExactMatch", "RegexFormat"]
    assert registry.classes("rewards") == {"ExactMatch": ExactMatch, "RegexFormat": RegexFormat}
    assert registry.names("algorithms") == []


def test_every_registration_has_its_owner(registry):
    owners = {owner: [(r.kind, r.name) for r in mine] for owner, mine in registry.by_distribution().items()}
    assert owners == {
        "rlplug": [("rewards", "RegexFormat")],
        "acme-rewards": [("rewards", "ExactMatch"), ("rollouts", "HFRollout")],
    }


def test_unknown_kind_lists_the_kinds(registry):
    with pytest.raises(PluginError, match="acme-rewards registers unknown kind 'reward': use one of rollouts, "):
        registry.add("reward", ExactMatch)


@pytest.mark.parametrize("factory", [Fast, Fast(), lambda: ExactMatch()])
def test_what_is_no_class_of_the_kind_is_refused(registry, factory):
    with pytest.raises(
        PluginError, match=r"acme-rewards registers .* as one of rewards: make it a subclass of .*Reward"
    ):
        registry.add("rewards", factory)


@pytest.mark.parametrize("place", ["ExactMatch", "acme.rewards", "acme rewards:ExactMatch", "acme:rewards.ExactMatch"])
def test_a_name_without_its_module_is_refused(registry, place):
    with pytest.raises(PluginError, match=r"acme-rewards registers .*: write package.module:Class"):
        registry.add("rewards", place)


def test_a_name_is_imported_when_it_is_asked_for(registry, monkeypatch, tmp_path):
    """Catches a registry that loads what a run does not use, and one that imports a class twice."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_late.py").write_text("from rlplug_rewards.text import ExactMatch\nclass Late(ExactMatch): pass\n")
    registry.add("rewards", "acme_late:Late")
    registry.import_named({"ExactMatch", "Late in a sentence"})
    assert registry.names("rewards") == ["ExactMatch", "Late", "RegexFormat"]
    assert "acme_late" not in sys.modules
    registry.import_named({"Late"})
    assert registry.get("rewards", "Late") is sys.modules.pop("acme_late").Late


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("import acme_not_there", r"Broken of rewards as 'acme_broken:Broken', whose import raised .*acme_not_there"),
        ("Other = 1", "has no attribute 'Broken'"),
        ("Broken = 1", "registers 1 as one of rewards: make it a subclass"),
    ],
)
def test_a_name_that_cannot_be_imported_says_whose_it_is(registry, monkeypatch, tmp_path, body, problem):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_broken.py").write_text(body)
    registry.add("rewards", "acme_broken:Broken")
    with pytest.raises(PluginError, match=f"acme-rewards registers .*{problem}|acme-rewards {problem}"):
        registry.get("rewards", "Broken")
    sys.modules.pop("acme_broken", None)


@pytest.mark.parametrize("owner", ["acme-other", "acme-rewards"])
def test_taken_name_names_both_owners(registry, owner):
    other = type("ExactMatch", (Reward,), {"score": ExactMatch.score})
    registry.set_owner(owner)
    with pytest.raises(PluginError, match=f"{owner} and acme-rewards both register 'ExactMatch' in rewards: rename"):
        registry.add("rewards", other)
    assert registry.get("rewards", "ExactMatch") is ExactMatch


def test_one_name_in_two_kinds_is_no_collision(registry):
    namesake = type("ExactMatch", (Fast,), {})
    registry.add("optimizations", namesake)
    assert registry.get("optimizations", "ExactMatch") is namesake
    assert registry.get("rewards", "ExactMatch") is ExactMatch


def test_unknown_name_lists_what_is_registered_and_the_nearest(registry):
    with pytest.raises(ConfigError) as caught:
        registry.get("rewards", "ExactMatsch")
    assert str(caught.value) == (
        "'ExactMatsch' is not a known reward. Did you mean 'ExactMatch'? Registered rewards: ExactMatch, RegexFormat."
    )


def test_unknown_name_of_an_empty_kind(registry):
    with pytest.raises(ConfigError, match=r"'Nothing' is not a known algorithm\. Registered algorithms: none"):
        registry.get("algorithms", "Nothing")


@pytest.mark.parametrize(
    ("package", "name"), [(each, n["classes"][0]) for each, n in plugin_index().items() if n["classes"]]
)
def test_unknown_name_of_a_published_plugin_names_the_package(registry, package, name):
    with pytest.raises(ConfigError, match=f"{name}.*comes with {package}: pip install {package}. Registered"):
        registry.get("algorithms", name)


def test_a_feature_of_a_plugin_that_is_missing_names_its_key_and_the_package(registry):
    """Alone catches a feature that left the core, and whose key then ends a run without a word on what to install."""
    message = r"^model\.memory\.offload comes with rlplug-optims: pip install rlplug-optims\. Or leave it out"
    with pytest.raises(ConfigError, match=message):
        registry.get_for("model.memory.offload", "StateOffload")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_registration_hook(kind):
    from rlplug import hookspecs

    assert callable(getattr(hookspecs, f"rlplug_register_{kind}"))
