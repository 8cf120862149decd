"""What is wrong with one plugin, on distributions that are installed as pip would."""

from __future__ import annotations

import pytest

from rlplug.errors import ConfigError, PluginError
from rlplug.plugin_manager import PluginManager

API = 'RLPLUG_API_VERSION = ">=3,<4"\n'
HEADER = f"from rlplug.plugin_manager import hookimpl\n{API}"
OBSERVE = HEADER + "@hookimpl\ndef rlplug_after_update(metrics, step):\n    return {__name__: step}\n"


def hook(signature: str, mark: str = "@hookimpl", body: str = "pass") -> str:
    return f"{HEADER}{mark}\ndef {signature}:\n    {body}\n"


ABSENT = {
    "import failure": (
        "import no_such_library",
        "importing 'acme_broken_plugin' raised ModuleNotFoundError: No module named 'no_such_library'.",
        "Install what it misses, or another version of acme-broken.",
    ),
    "syntax error": ("def", "raised SyntaxError: invalid syntax", "another version of acme-broken."),
}
BROKEN = {
    "no api version": (
        OBSERVE.replace(API, ""),
        "it declares no RLPLUG_API_VERSION.",
        'Write RLPLUG_API_VERSION = ">=3,<4"',
    ),
    "unparsable api version": (
        OBSERVE.replace(">=3,<4", "1.0"),
        "RLPLUG_API_VERSION = '1.0' is not a version range.",
        'Write it like ">=3,<4".',
    ),
    "other api version": (
        OBSERVE.replace(">=3,<4", ">=2,<3"),
        "it supports hook API >=2,<3, and this rlplug has 3.3.",
        "Install a version of acme-broken for API 3.3, or another rlplug.",
    ),
    "misspelled hook": (
        hook("rlplug_after_updates(metrics)"),
        "there is no hook 'rlplug_after_updates'. Did you mean 'rlplug_after_update'?",
        "Rename the function.",
    ),
    "marked function of another name": (hook("after_update(metrics)"), "no hook 'after_update'", "Rename"),
    "unmarked hook": (
        hook("rlplug_after_update(metrics)", mark=""),
        "rlplug_after_update is not marked.",
        "Put @rlplug.plugin_manager.hookimpl above it.",
    ),
    "unknown argument": (
        hook("rlplug_after_update(metric, step)"),
        "rlplug_after_update takes 'metric', which the hook does not have. Did you mean 'metrics'?",
        "Its arguments are metrics, step: take those that you use.",
    ),
    "argument with default": (
        hook("rlplug_after_update(metrics, step=0)"),
        "rlplug_after_update has a default for 'step', and pluggy passes no argument that has one.",
        "Drop the default.",
    ),
    "all arguments": (hook("rlplug_after_update(**arguments)"), "takes 'arguments'", "take those that you use."),
    "no hooks": (HEADER, "it implements no hook.", "Implement one of those in rlplug.hookspecs."),
    "replaces the core": (
        hook("rlplug_compute_loss(algorithm)"),
        "rlplug_compute_loss would replace what the core does.",
        "Mark it @hookimpl(wrapper=True) and yield.",
    ),
    "wrapper without yield": (
        hook("rlplug_compute_loss(algorithm)", mark="@hookimpl(wrapper=True)"),
        "rlplug_compute_loss is a wrapper and does not yield.",
        "Write result = yield, and return a result.",
    ),
    "yield without wrapper": (
        hook("rlplug_after_update()", body="yield"),
        "rlplug_after_update yields but is not a wrapper.",
        "or mark it @hookimpl(wrapper=True).",
    ),
    "wrapped registration": (
        hook("rlplug_register_rewards()", mark="@hookimpl(wrapper=True)", body="return (yield)"),
        "rlplug_register_rewards cannot be wrapped.",
        "Mark it @hookimpl",
    ),
    "order by pluggy's marks": (
        hook("rlplug_after_update()", mark="@hookimpl(trylast=True)"),
        "rlplug_after_update is marked trylast, which rlplug does not use.",
        "RLPLUG_BEFORE and RLPLUG_AFTER set the order",
    ),
    "order as a string": (
        OBSERVE + "RLPLUG_AFTER = 'algos'",
        "RLPLUG_AFTER = 'algos' is not a tuple.",
        "Write RLPLUG_AFTER = ('algos',).",
    ),
    "registering raises": (
        hook("rlplug_register_rewards(registry)", body="registry.nothing"),
        "registering failed: AttributeError: 'Registry' object has no attribute 'nothing'.",
        "Another version of acme-broken may fit.",
    ),
    "unknown kind": (
        hook("rlplug_register_rewards(registry)", body="registry.add('reward', int)"),
        "registering failed: acme-broken registers unknown kind 'reward'",
        "use one of rollouts, trainers, algorithms, rewards, environments, launchers, optimizations, classes.",
    ),
    "wrong base class": (
        hook("rlplug_register_rewards(registry)", body="registry.add('rewards', int)"),
        "registering failed: acme-broken registers <class 'int'> as one of rewards",
        "make it a subclass of rlplug.interfaces' Reward.",
    ),
}


def record_of(manager: PluginManager, name: str):
    (record,) = [record for record in manager.records if record.name == name]
    return record


@pytest.mark.parametrize(("body", "problem", "fix"), BROKEN.values(), ids=BROKEN)
def test_wrong_plugin_stops_with_distribution_file_and_fix(install_plugin, body, problem, fix):
    file = install_plugin("broken", body)
    with pytest.raises(PluginError) as caught:
        PluginManager()
    message = str(caught.value)
    assert message.startswith(f"plugin 'broken' (distribution acme-broken 2.5) in {file}: ")
    assert problem in message
    assert fix in message
    assert message.endswith("Or leave the plugin out: --block broken, or RLPLUG_BLOCK=broken.")


@pytest.mark.parametrize(("body", "problem", "fix"), ABSENT.values(), ids=ABSENT)
def test_a_plugin_that_cannot_be_imported_is_left_out_with_a_line(install_plugin, monkeypatch, body, problem, fix):
    """Catches a broken plugin that stops the runs which do not use it, or that is left out in silence."""
    install_plugin("broken", body)
    install_plugin("good", OBSERVE)
    lines: list[str] = []
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_info", lines.append)
    manager = PluginManager()
    (line,) = lines
    assert line.startswith("plugin 'broken' of acme-broken 2.5 was left out: ")
    assert problem in line
    assert line.endswith(fix)
    assert record_of(manager, "broken").state == "failed"
    assert {"acme_good_plugin": 3} in manager.hook.rlplug_after_update(metrics={}, step=3)


def test_what_a_left_out_plugin_may_bring_is_missed_with_the_reason(install_plugin):
    """Catches advice to correct a name, or to install what is installed, where a plugin cannot be imported."""
    install_plugin("broken", "import no_such_library")
    manager = PluginManager()
    with pytest.raises(ConfigError, match=r"'Wise' is not a known reward.*plugin 'broken'.*no_such_library"):
        manager.registry.get("rewards", "Wise")


@pytest.mark.parametrize(("body", "problem", "fix"), (ABSENT | BROKEN).values(), ids=ABSENT | BROKEN)
def test_unless_strict_a_wrong_plugin_is_recorded_and_the_rest_goes_on(install_plugin, body, problem, fix):
    file = install_plugin("broken", body)
    install_plugin("good", OBSERVE)
    manager = PluginManager(strict=False)
    broken = record_of(manager, "broken")
    assert (broken.state, broken.file) == ("failed", str(file))
    assert problem in broken.reason
    assert fix in broken.reason
    assert record_of(manager, "good").state == "loaded"
    assert {"acme_good_plugin": 3} in manager.hook.rlplug_after_update(metrics={}, step=3)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("acme_broken_plugin:rlplug_after_update", "'acme_broken_plugin:rlplug_after_update' is not a module."),
        ("acme_broken_plugin:nothing", "raised AttributeError"),
        ("acme_broken_plugin.nothing", "raised ModuleNotFoundError"),
    ],
)
def test_entry_point_that_names_no_module(install_plugin, value, problem):
    file = install_plugin("broken", OBSERVE, value=value)
    record = record_of(PluginManager(strict=False), "broken")
    assert problem in record.reason
    assert record.file == str(file)


def test_failing_import_of_a_package_names_the_packages_file(install_plugin):
    package = install_plugin("broken", OBSERVE, value="acme_package.plugin").parent / "acme_package"
    package.mkdir()
    (package / "__init__.py").write_text("import no_such_library")
    (package / "plugin.py").write_text(OBSERVE)
    record = record_of(PluginManager(strict=False), "broken")
    assert "no_such_library" in record.reason
    assert record.file == str(package / "__init__.py")


def test_what_a_module_imports_is_not_taken_for_a_hook(install_plugin):
    # torch.ops answers to every attribute, pluggy's mark included; a module can be named rlplug_...
    install_plugin("good", f"from torch import ops\nimport rlplug_algos\n{OBSERVE}")
    assert record_of(PluginManager(), "good").hooks == ["rlplug_after_update"]
