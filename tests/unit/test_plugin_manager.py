"""Discovery, names, order and blocking, on distributions that are installed as pip would."""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace

import pytest
from rlplug_devkit.plugins_command import sequence_of

from rlplug.errors import ConfigError, PluginError
from rlplug.observability import hook_costs
from rlplug.observability.hook_costs import HookCosts
from rlplug.plugin_manager import PluginManager, describe

API = 'RLPLUG_API_VERSION = ">=3,<4"\n'
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
    body = REGISTER.replace("Optimization", "Reward").replace("optimizations", "rewards").format("FunctionReward")
    install_plugin("shadow", body)
    with pytest.raises(PluginError, match="acme-shadow and rlplug both register 'FunctionReward' in rewards"):
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


@pytest.fixture
def any_batch(monkeypatch):
    """Let lists stand for batches, whose checks ``interfaces/checks`` has tests of."""
    monkeypatch.setattr(hook_costs, "CHECKS", {})


def test_wrappers_nest_in_the_declared_order_around_the_core(install_plugin, any_batch):
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
        "api_range": ">=3,<4",
        "registers": ["optimizations/Speedup"],
        "hooks": ["rlplug_register_optimizations"],
        "state": "loaded",
        "reason": "",
    }


# ---- what hooks cost ----------------------------------------------------------------------------------------------

WRAPPER = "@hookimpl(wrapper=True)"


def costs_of(manager: PluginManager) -> dict[tuple[str, str, str], tuple[int, float]]:
    rows = manager.costs.rows()
    return {(row["plugin"], row["hook"], row["phase"]): (row["calls"], row["seconds"]) for row in rows}


def test_costs_are_counted_by_plugin_hook_and_phase_without_what_is_wrapped(install_plugin, any_batch):
    """Catches a wrapper that is charged for what it wraps, and costs in the wrong phase."""
    signature = "rlplug_prepare_batch(batch, step)"
    install_plugin("outer", hook(signature, WRAPPER, "import time; time.sleep(0.02); inner = yield; return inner"))
    body = "import time; inner = yield; time.sleep(0.1); return [*inner, step]"
    install_plugin("inner", hook(signature, WRAPPER, body) + "RLPLUG_AFTER = ('outer',)\n")
    manager = PluginManager()
    for _ in range(2):
        with manager.costs.during("advantages"):
            assert manager.hook.rlplug_prepare_batch(batch=[0], step=3) == [0, 3]
    manager.hook.rlplug_prepare_batch(batch=[0], step=3)

    costs = costs_of(manager)
    assert costs.keys() == {
        (plugin, "prepare_batch", phase)
        for plugin in ("outer", "inner", "rlplug")
        for phase in ("advantages", "between phases")
    }
    assert {key: calls for key, (calls, _) in costs.items() if key[2] == "advantages"}.keys() == {
        (plugin, "prepare_batch", "advantages") for plugin in ("outer", "inner", "rlplug")
    }
    assert [costs[plugin, "prepare_batch", "advantages"][0] for plugin in ("outer", "inner", "rlplug")] == [2, 2, 2]
    assert (
        0.04
        <= costs["outer", "prepare_batch", "advantages"][1]
        < 0.2
        <= costs["inner", "prepare_batch", "advantages"][1]
    )
    assert next(iter(costs))[0] == "inner"  # the largest first


def test_a_measured_hook_raises_what_it_raised(install_plugin, any_batch):
    """Also where a wrapper handles what it wraps, and where it yields twice, which pluggy says with its name."""
    body = "try:\n        return (yield)\n    except ValueError:\n        return ['handled']"
    install_plugin("handles", hook("rlplug_prepare_batch(step)", WRAPPER, body))
    install_plugin("raises", hook("rlplug_prepare_batch()", WRAPPER, "raise ValueError('mine'); yield"))
    install_plugin("twice", hook("rlplug_sync_weights()", WRAPPER, "yield; yield"))
    install_plugin("fails", hook("rlplug_after_update(step)", body="raise KeyError(step)"))
    manager = PluginManager()

    assert manager.hook.rlplug_prepare_batch(batch=[0], step=3) == ["handled"]
    with pytest.raises(KeyError, match="7"):
        manager.hook.rlplug_after_update(metrics={}, step=7)
    engine = SimpleNamespace(update_weights=lambda buckets, version: None)
    with pytest.raises(RuntimeError, match=r"'rlplug_sync_weights' .*acme_twice_plugin\.py:3 has second yield"):
        manager.hook.rlplug_sync_weights(engine=engine, buckets=[], version=1)
    assert costs_of(manager)["raises", "prepare_batch", "between phases"][0] == 1


def test_the_call_order_is_that_of_the_calls(install_plugin):
    """Catches an order that is shown reversed."""
    install_plugin("alpha", hook("rlplug_prepare_batch()", WRAPPER, "return (yield)") + "RLPLUG_AFTER = ('beta',)\n")
    install_plugin("beta", hook("rlplug_prepare_batch()", WRAPPER, "return (yield)"))
    order = PluginManager().call_order()

    assert [(each.plugin_name, each.wrapper) for each in order["prepare_batch"]] == [
        ("beta", True),
        ("alpha", True),
        ("rlplug", False),
    ]
    assert sequence_of(order["prepare_batch"]) == "beta around alpha around rlplug"
    assert sequence_of(order["register_trainers"]).endswith(", rlplug")
    assert all(order.values()), "hooks that nobody implements are left out"


def test_counting_costs_microseconds():
    """Measured: 3 us a call on a busy machine; a step of the quickstart makes about ten in half a second."""
    costs, num_calls = HookCosts(), 20_000
    timed = costs.timed("plugin", "hook", lambda: None, is_wrapper=False, is_checked=False)
    began = time.perf_counter()
    for _ in range(num_calls):
        timed()
    assert (time.perf_counter() - began) / num_calls < 50e-6  # on a machine that does much else
    assert costs.rows()[0]["calls"] == num_calls


# ---- local modules, which -p names --------------------------------------------------------------------------------


def test_a_local_module_is_a_plugin_without_a_version(tmp_path, monkeypatch):
    """Catches hooks of a local file that no run calls, or that are called before those of installed plugins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RLPLUG_PLUGINS", "my_local_hooks")
    (tmp_path / "my_local_hooks.py").write_text(OBSERVE.replace(API, ""))
    manager = PluginManager()
    assert record_of(manager, "my_local_hooks").version == "local"
    assert manager.hook.rlplug_after_update(metrics={}, step=3)[-1] == {"my_local_hooks": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "importing 'my_wrong_hooks' raised ModuleNotFoundError"),
        ("from rlplug.plugin_manager import hookimpl\n@hookimpl\ndef rlplug_after_updat(step): pass\n", "Did you mean"),
        ("x = 1\n", "it implements no hook"),
    ],
)
def test_a_wrong_local_module_is_named_with_its_option(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RLPLUG_PLUGINS", "my_wrong_hooks")
    monkeypatch.delitem(sys.modules, "my_wrong_hooks", raising=False)
    if text is not None:
        (tmp_path / "my_wrong_hooks.py").write_text(text)
    with pytest.raises(PluginError, match=r"the module 'my_wrong_hooks', given with -p") as caught:
        PluginManager()
    assert message in str(caught.value)
