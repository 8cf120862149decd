"""Writes rlplug/plugin_index.json: which distribution of this repository brings which class, command and module.

Error messages read it. ``python scripts/write_plugin_index.py`` (or ``make docs``) writes it; ``--check`` writes
nothing and exits with 1 when the file is not what the plugins under ``plugins/`` bring. They have to be installed.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from distributions import ROOT, plugin_distributions
from written_files import write_or_check

from rlplug.plugin_checks import REGISTRATION_PREFIX
from rlplug.plugin_manager import plugins

INDEX: Final = ROOT / "rlplug" / "plugin_index.json"
MOVED: Final = {
    "rlplug.testing": "rlplug_devkit",
    "rlplug.cli.doctor": "rlplug_devkit.doctor",
    "rlplug.cli.new_plugin": "rlplug_devkit.new_plugin",
    "rlplug.cli.commands.completion": "rlplug_devkit.completion",
    "rlplug.cli.commands.chat": "rlplug_eval.commands.chat",
    "rlplug.cli.commands.evaluate": "rlplug_eval.commands.evaluate",
    "rlplug.cli.commands.export": "rlplug_eval.commands.export",
    "rlplug.cli.commands.plan": "rlplug_plan.command",
    "rlplug.training.memory_plan": "rlplug_plan",
    "rlplug.setup.memory_inputs": "rlplug_plan.run_inputs",
    "rlplug.cli.commands.launch": "rlplug_launch.command",
    "rlplug.cli.commands.report": "rlplug_watch.commands.report",
    "rlplug.cli.commands.watch": "rlplug_watch.commands.watch",
    "rlplug.weight_sync.flat_buckets": "rlplug_engines.flat_buckets",
    "rlplug.weight_sync.fp8_engine_checks": "rlplug_engines.fp8_engine_checks",
    "rlplug.rollout.partial": "rlplug_async",
    "rlplug.training.streaming": "rlplug_async",
    "rlplug.observability.timeline": "rlplug_async.timeline",
    "rlplug.recording.secrets": "rlplug_watch.secrets",
    "rlplug.observability.profiler": "rlplug_watch.profile.profiler",
    "rlplug.observability.profile_summary": "rlplug_watch.profile.summary",
    "rlplug.observability.profile_text": "rlplug_watch.profile.text",
    "rlplug.rollout.engines": "rlplug_engines.colocated",
    "rlplug.rollout.servers": "rlplug_engines.servers",
    "rlplug.rollout.workers": "rlplug_engines.workers",
    "rlplug.rollout.engine_host": "rlplug_engines.engine_host",
    "rlplug.evaluation": "rlplug_eval",
    "rlplug.launch": "rlplug_launch",
    "rlplug.cli.commands.plugins": "rlplug_devkit.plugins_command",
    "rlplug.data.reasoning_gym": "rlplug_rewards.reasoning_gym",
    "rlplug.rewards.text": "rlplug_rewards.text",
    "rlplug.rewards.code": "rlplug_rewards.code",
    "rlplug.rewards.judges": "rlplug_rewards.judges",
    "rlplug.rewards.requests": "rlplug_rewards.requests",
    "rlplug.rewards.reward_model": "rlplug_rewards.reward_model",
    "rlplug.rewards.verifiers": "rlplug_rewards.verifiers",
    "rlplug.environments": "rlplug_sandbox",
    "rlplug.observability.token_log": "rlplug_watch.token_log",
    "rlplug.training.samples.token_capture": "rlplug_watch.token_log.capture",
    "rlplug.recording.experiment_log": "rlplug_watch.loggers.experiment_log",
    "rlplug.observability.advice": "rlplug_watch.advice",
    "rlplug.observability.loggers": "rlplug_watch.loggers",
    "rlplug.observability.report": "rlplug_watch.report",
    "rlplug.observability.watch": "rlplug_watch.page",
}
"""Modules that the core had, and what they are now."""


def index() -> str:
    """Return the file's text.

    Raises:
        SystemExit: A plugin of the repository is not installed.
    """
    manager = plugins()
    found: dict[str, Any] = {}
    for distribution in plugin_distributions():
        if not {*distribution.plugins} <= {record.name for record in manager.records}:
            raise SystemExit(f"install {distribution.name}: pip install --editable {distribution.folder}")
        registered = manager.registry.by_distribution().get(distribution.name, [])
        packages = {package: package for package in distribution.packages}
        moved = {old: new for old, new in MOVED.items() if new.partition(".")[0] in packages}
        found[distribution.name] = {
            "classes": sorted(r.name for r in registered),
            "commands": distribution.commands,
            "hooks": sorted(
                hook
                for record in manager.records
                if record.distribution == distribution.name
                for hook in record.hooks
                if not hook.startswith(REGISTRATION_PREFIX)
            ),
            "modules": packages | moved,
        }
    return json.dumps(dict(sorted(found.items())), indent=2) + "\n"


def main() -> int:
    return write_or_check(__doc__, INDEX, lambda _: index())


if __name__ == "__main__":
    sys.exit(main())
