"""Discovery, names, order and blocking, on distributions that are installed as pip would."""

from __future__ import annotations

import itertools
import sys

import pytest

from rlplug.errors import ConfigError, PluginError
from rlplug.plugin_manager import PluginManager, describe

API = 'RLPLUG_API_VERSION = ">=2,<3"\n'
HEADER = f"from rlplug.plugin_manager import hookimpl\n{API}"
OBSERVE = HEADER + "@hookimpl\ndef rlplug_after_update(metrics, step):\n    return {__name__: step}\n"
REGISTER = HEADER + (
    "from rlplug.interfaces import Optimization\n"
    "class {0}(Optimization):\n    def effects(self): return []\n"
    "@hookimpl\ndef rlplug_register_optimizations(registry):\n    registry.add('optimizations', {0})\n"
)


def hook(signature: str, mark: str = "@hookimpl", body: str = "pass") -> str:
    return f"{HEADER}{mark}\ndef {signature}:\n    {body}\n"


def record_of(manager: PluginManager, name: str):
    (record,) = [record for record in manager.records if record.name == name]
    return record


def call_order(manager: PluginManager) -> list[str]:
    """Names of the plugins made from ``OBSERVE``, in the order in which they were called."""
    answers = manager.hook.rlplug_after_update(metrics={}, step=3)
    return [module.removeprefix("acme_").removesuffix("_plugin") for answer in answers for module in answer]


# ---- what is wrong between plugins --------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_two_plugins_that_register_one_name(install_plugin, strict):
    install_plugin("first", REGISTER.format("Twin"))
    file = install_plugin("second", REGISTER.format("Twin"))
    expected = "acme-second and acme-first both register 'Twin' in optimizations"
    if strict:
        with pytest.raises(PluginError, match=expected) as caught:
            PluginManager()
        assert str(caught.value).startswith(f"plugin 'second' (distribution acme-second 2.5) in {file}: ")
        return
    manager = PluginManager(strict=False)
    assert expected in record_of(manager, "second").reason
    assert record_of(manager, "second").registers == []
    assert record_of(manager, "first").registers == ["optimizations/Twin"]
    assert manager.registry.get("optimizations", "Twin").__module__ == "acme_first_plugin"


def test_name_that_the_core_registers(install_plugin):
    body = REGISTER.replace("Optimization", "Reward").replace("optimizations", "rewards").format("ExactMatch")
    install_plugin("shadow", body)
    with pytest.raises(PluginError, match="acme-shadow and rlplug both register 'ExactMatch' in rewards"):
        PluginManager()


def test_two_distributions_with_one_entry_point_name(install_plugin):
    install_plugin("twin", OBSERVE, distribution="acme-one", version="1.0")
    file = install_plugin("twin", OBSERVE, distribution="acme-two", version="2.0")
    with pytest.raises(PluginError) as caught:
        PluginManager()
    message = str(caught.value)
    assert message.startswith("plugin 'twin' (distribution acme-two 2.0)")
    assert "acme-one 1.0 has a plugin of that name too" in message
    assert "--block acme-two" in message
    loaded, failed = [record for record in PluginManager(strict=False).records if record.name == "twin"]
    assert (loaded.distribution, loaded.state) == ("acme-one", "loaded")
    assert (failed.distribution, failed.state) == ("acme-two", "failed")
    blocked, loaded = [record for record in PluginManager(["acme-one"]).records if record.name == "twin"]
    assert (blocked.state, loaded.state, loaded.file) == ("blocked", "loaded", str(file))


def test_entry_point_with_the_cores_name(install_plugin):
    install_plugin("rlplug", OBSERVE, distribution="acme-impostor")
    with pytest.raises(PluginError, match=r"acme-impostor 2\.5.*rlplug .* has a plugin of that name too"):
        PluginManager()
    assert record_of(PluginManager(["acme-impostor"]), "algos").state == "loaded"


@pytest.mark.parametrize("strict", [True, False])
def test_one_module_under_two_names(install_plugin, strict):
    install_plugin("one", OBSERVE)
    install_plugin("two", "", value="acme_one_plugin")
    if strict:
        with pytest.raises(PluginError, match=r"acme-two 2\.5.*plugin 'one' names the same module"):
            PluginManager()
    else:
        assert record_of(PluginManager(strict=False), "two").state == "failed"


# ---- order --------------------------------------------------------------------------------------------------------


def test_order_does_not_depend_on_the_order_of_sys_path(install_plugin, monkeypatch):
    folders = [str(install_plugin(name, OBSERVE).parent) for name in ("gamma", "alpha", "beta")]
    rest = [path for path in sys.path if path not in folders]
    for order in itertools.permutations(folders):
        monkeypatch.setattr(sys, "path", [*order, *rest])
        manager = PluginManager()
        assert call_order(manager) == ["alpha", "beta", "gamma"]
        names = [record.name for record in manager.records]
        assert names == ["rlplug", *sorted(set(names) - {"rlplug"})]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"alpha": "RLPLUG_AFTER = ('gamma',)"}, ["beta", "gamma", "alpha"]),
        ({"gamma": "RLPLUG_BEFORE = ['alpha']"}, ["beta", "gamma", "alpha"]),
        ({"gamma": "RLPLUG_BEFORE = ('alpha', 'beta')"}, ["gamma", "alpha", "beta"]),
        ({"alpha": "RLPLUG_AFTER = ('beta',)", "beta": "RLPLUG_AFTER = ('gamma',)"}, ["gamma", "beta", "alpha"]),
        ({"alpha": "RLPLUG_AFTER = ('not_installed',)"}, ["alpha", "beta", "gamma"]),
    ],
)
def test_hooks_are_called_in_the_declared_order(install_plugin, declared, expected):
    for name in ("alpha", "beta", "gamma"):
        install_plugin(name, OBSERVE + declared.get(name, ""))
    assert call_order(PluginManager()) == expected


def test_wrappers_nest_in_the_declared_order_around_the_core(install_plugin):
    body = hook(
        "rlplug_prepare_batch()", mark="@hookimpl(wrapper=True)", body="inner = yield; return [*inner, __name__]"
    )
    install_plugin("alpha", body)
    install_plugin("beta", body + "RLPLUG_BEFORE = ('alpha',)")
    prepared = PluginManager().hook.rlplug_prepare_batch(batch=["core"], step=0)
    assert prepared == ["core", "acme_alpha_plugin", "acme_beta_plugin"]


def test_the_core_resolves_what_no_plugin_does(install_plugin):
    body = "return 'mine' if path == 'my model' else None"
    install_plugin("alpha", hook("rlplug_make_tokenizer(path)", body=body))
    make = PluginManager().hook.rlplug_make_tokenizer
    assert make(path="my model") == "mine"
    with pytest.raises(OSError, match="no_such_folder"):  # AutoTokenizer's: the core was asked
        make(path="./no_such_folder")


@pytest.mark.parametrize("strict", [True, False])
def test_circle_of_plugins(install_plugin, strict):
    install_plugin("alpha", OBSERVE + "RLPLUG_BEFORE = ('beta',)")
    install_plugin("beta", OBSERVE + "RLPLUG_BEFORE = ('alpha',)")
    install_plugin("gamma", OBSERVE)
    expected = r"wants to run before the next: alpha \(acme-alpha\) -> beta \(acme-beta\) -> alpha \(acme-alpha\)\."
    if strict:
        with pytest.raises(PluginError, match=expected) as caught:
            PluginManager()
        assert "Drop one of their RLPLUG_BEFORE or RLPLUG_AFTER." in str(caught.value)
        return
    manager = PluginManager(strict=False)
    assert [record_of(manager, name).state for name in ("alpha", "beta", "gamma")] == ["failed", "failed", "loaded"]
    assert call_order(manager) == ["gamma"]


# ---- blocking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocked", "variable"),
    [(["broken"], ""), (["acme-broken"], ""), ([], "broken"), ([], "algos, acme-broken"), (["broken"], "broken")],
)
def test_blocked_plugin_is_not_even_imported(install_plugin, monkeypatch, blocked, variable):
    install_plugin("broken", "raise AssertionError('imported')")
    install_plugin("good", OBSERVE)
    monkeypatch.setenv("RLPLUG_BLOCK", variable)
    manager = PluginManager(blocked)
    assert record_of(manager, "broken").state == "blocked"
    assert record_of(manager, "algos").state == ("blocked" if "algos" in variable else "loaded")
    assert call_order(manager) == ["good"]


@pytest.mark.parametrize("strict", [True, False])
def test_blocking_what_is_not_installed(install_plugin, strict):
    install_plugin("liger", OBSERVE)
    with pytest.raises(
        ConfigError, match=r"cannot block 'ligr': .* Did you mean 'liger'\?.*Installed: acme-liger, alg"
    ):
        PluginManager(["ligr"], strict=strict)


# ---- what is loaded -----------------------------------------------------------------------------------------------


def test_two_plugins_of_one_distribution_register_each_their_own(install_plugin):
    folder = install_plugin("first", REGISTER.format("One"), distribution="acme").parent
    (folder / "acme_second.py").write_text(REGISTER.format("Two"))
    with (folder / "acme-2.5.dist-info/entry_points.txt").open("a") as entry_points:
        entry_points.write("second = acme_second\n")
    manager = PluginManager()
    assert record_of(manager, "first").registers == ["optimizations/One"]
    assert record_of(manager, "second").registers == ["optimizations/Two"]


def test_records_say_what_is_loaded(install_plugin):
    file = install_plugin("good", REGISTER.format("Speedup"))
    core, *others = describe(PluginManager().records)
    assert (core["name"], core["state"]) == ("rlplug", "loaded")
    assert "rollouts/HFRollout" in core["registers"]
    assert "rlplug_compute_loss" in core["hooks"]
    (good,) = [record for record in others if record["name"] == "good"]
    assert good == {
        "name": "good",
        "distribution": "acme-good",
        "version": "2.5",
        "file": str(file),
        "api_range": ">=2,<3",
        "registers": ["optimizations/Speedup"],
        "hooks": ["rlplug_register_optimizations"],
        "state": "loaded",
        "reason": "",
    }
