"""Where a run's groups come from: the source that a plugin makes, or the core's."""

from __future__ import annotations

import pytest
import torch
from rlplug_algos.grpo import GRPO
from rlplug_async.source import PartialSource

from rlplug import plugin_manager
from rlplug.config import RunConfig
from rlplug.errors import ConfigError, PluginError
from rlplug.models.config import ModelConfig
from rlplug.plugin_manager import PluginManager
from rlplug.rollout.config import PartialRollout
from rlplug.rollout.source import RolloutSource
from rlplug.setup.start import make_source

PARTIAL = PartialRollout(max_tokens_per_step=8)


def config_of(partial_rollout: PartialRollout | None) -> RunConfig:
    return RunConfig(ModelConfig("x"), GRPO(), torch.optim.AdamW, partial_rollout=partial_rollout)


def test_a_plugin_makes_the_source_of_its_options() -> None:
    assert type(make_source(config_of(None))) is RolloutSource
    assert type(make_source(config_of(PARTIAL))) is PartialSource


def test_options_of_a_missing_plugin_name_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_manager, "_current", PluginManager(blocked=["async"]))
    assert type(make_source(config_of(None))) is RolloutSource
    with pytest.raises(ConfigError, match=r"model\.partial_rollout comes with rlplug-async: plugin 'async' is blocked"):
        make_source(config_of(PARTIAL))


def test_what_is_no_source_is_refused(install_plugin) -> None:  # type: ignore[no-untyped-def]
    marked = "from rlplug.plugin_manager import hookimpl\nRLPLUG_API_VERSION = '>=3.1,<4'\n"
    install_plugin("alpha", f"{marked}@hookimpl\ndef rlplug_make_source():\n    return 7\n")
    plugin_manager.use_plugins(PluginManager())
    try:
        with pytest.raises(PluginError, match="rlplug_make_source returned int 7: return a RolloutSource, or None"):
            make_source(config_of(None))
    finally:
        plugin_manager.forget_plugins()
