"""The signatures of hook API 3.x: what a plugin was written for stays."""

from __future__ import annotations

import inspect
import sys
import warnings

import pytest
import write_compatibility
from command_line import ROOT
from distributions import Distribution
from forked import run_forked

from rlplug import hookspecs
from rlplug.plugin_manager import PluginManager

FROZEN = {
    "rlplug_register_rollouts": (
        "registry: Registry",
        "None",
    ),
    "rlplug_register_trainers": (
        "registry: Registry",
        "None",
    ),
    "rlplug_register_algorithms": (
        "registry: Registry",
        "None",
    ),
    "rlplug_register_rewards": (
        "registry: Registry",
        "None",
    ),
    "rlplug_register_environments": (
        "registry: Registry",
        "None",
    ),
    "rlplug_register_launchers": (
        "registry: Registry",
        "None",
    ),
    "rlplug_register_optimizations": (
        "registry: Registry",
        "None",
    ),
    "rlplug_register_classes": (
        "registry: Registry",
        "None",
    ),
    "rlplug_make_observer": (
        "",
        "RunObserver | None",
    ),
    "rlplug_after_rollout": (
        "rollout: Rollout, step: int",
        "Mapping[str, float] | None",
    ),
    "rlplug_after_update": (
        "metrics: Mapping[str, float], step: int",
        "Mapping[str, float] | None",
    ),
    "rlplug_sync_weights": (
        "engine: RolloutEngine, buckets: Iterable[Bucket], version: int",
        "SyncReport | Generator[None, SyncReport, SyncReport]",
    ),
    "rlplug_prepare_batch": (
        "batch: StepBatch, step: int",
        "StepBatch | Generator[None, StepBatch, StepBatch]",
    ),
    "rlplug_compute_loss": (
        "algorithm: Algorithm, micro_batch: Batch, logprobs: Tensor, entropy: Tensor, denominators: Denominators",
        "LossOutput | Generator[None, LossOutput, LossOutput]",
    ),
    "rlplug_make_tokenizer": (
        "path: str",
        "PreTrainedTokenizerBase | None",
    ),
    "rlplug_explain_key": (
        "name: str",
        "str | None",
    ),
    "rlplug_make_source": (
        "config: RunConfig",
        "RolloutSource | None",
    ),
    "rlplug_make_row_layout": (
        "config: RunConfig, mesh: MeshSizes, on_gpu: bool",
        "RowLayout | None",
    ),
    "rlplug_plan_memory": (
        "config: RunConfig, spec: PolicySpec, batch: BatchPlan, strategy: RLFSDP2Strategy, mesh: MeshSizes, "
        "longest: int, gpu: GPU",
        "MemoryDecisions | None",
    ),
    "rlplug_make_token_log": (
        "folder: Path, options: TokenLogOptions, config: RunConfig, strategy: RLFSDP2Strategy, "
        "tokenizer: PreTrainedTokenizerBase",
        "TokenLog | None",
    ),
    "rlplug_make_experiment_log": (
        "folder: Path, trainer: Trainer",
        "ExperimentLog | None",
    ),
    "rlplug_make_profiler": (
        "steps: str, tool: str, ranks: str",
        "Callback | None",
    ),
}
"""Arguments and result of each hook, with their types. A new 3.x adds rows, and none changes before 4.0."""
RESOLVERS = {"rlplug_make_tokenizer", "rlplug_make_source", "rlplug_plan_memory", "rlplug_make_token_log"}
RESOLVERS |= {"rlplug_explain_key", "rlplug_make_experiment_log", "rlplug_make_profiler", "rlplug_make_row_layout"}
WRAPPERS = {"rlplug_sync_weights", "rlplug_prepare_batch", "rlplug_compute_loss"}


def signature_of(name: str) -> tuple[str, str]:
    signature = inspect.signature(getattr(hookspecs, name))
    arguments = ", ".join(f"{argument.name}: {argument.annotation}" for argument in signature.parameters.values())
    return arguments, str(signature.return_annotation)


@pytest.mark.parametrize("name", FROZEN)
def test_a_signature_of_the_api_is_kept(name: str) -> None:
    """A new argument may be added behind the others: pluggy passes by keyword."""
    arguments, result = signature_of(name)
    assert arguments == FROZEN[name][0] or arguments.startswith(f"{FROZEN[name][0]}, ")
    assert result == FROZEN[name][1]


def test_forms_of_the_api_are_kept() -> None:
    """Whose result counts, and which hooks may only be wrapped, is part of what a hook means."""
    specs = {name: getattr(hookspecs, name).rlplug_spec for name in FROZEN}
    assert {name for name, spec in specs.items() if spec["firstresult"]} == RESOLVERS | WRAPPERS
    assert {name for name in FROZEN if name in hookspecs.WRAPPER_ONLY} == WRAPPERS
    assert hookspecs.API_VERSION.startswith("3.")


def test_every_hook_says_since_when_it_is_there() -> None:
    """Catches a new hook without a row here, and one that is newer than the API's version."""
    hooks = {name for name in vars(hookspecs) if name.startswith("rlplug_")}
    assert hookspecs.SINCE.keys() == hooks == FROZEN.keys()
    assert hookspecs.DEPRECATED.keys() <= hooks
    since = [tuple(map(int, version.split("."))) for version in hookspecs.SINCE.values()]
    assert max(since) <= tuple(map(int, hookspecs.API_VERSION.split(".")))


def test_a_deprecated_hook_still_works_and_warns(install_plugin, monkeypatch) -> None:
    hook = "@hookimpl\ndef rlplug_after_update(step):\n    return {'x': step}\n"
    install_plugin("old", f"from rlplug.plugin_manager import hookimpl\nRLPLUG_API_VERSION = '>=3,<4'\n{hook}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        PluginManager()
    monkeypatch.setattr(hookspecs, "DEPRECATED", {"rlplug_after_update": "since 3.4; use rlplug_after_update_v2"})
    message = r"plugin 'old' \(acme-old 2\.5\) implements rlplug_after_update, which is deprecated since 3\.4; use"
    with pytest.warns(FutureWarning, match=message):
        manager = PluginManager()
    assert manager.hook.rlplug_after_update(metrics={}, step=3) == [{"x": 3}]


def test_a_plugin_of_another_api_is_not_in_the_table_of_versions(monkeypatch) -> None:
    monkeypatch.setattr(write_compatibility, "API_VERSION", "4.0")
    with pytest.raises(SystemExit, match=r"rlplug-algos .* is for rlplug .* and this is rlplug .* with hook API 4\.0"):
        write_compatibility.table(Distribution(ROOT))


@pytest.mark.parametrize("script", ["write_hook_reference", "write_compatibility"])
def test_the_page_is_what_the_code_says(script) -> None:
    done = run_forked([sys.executable, f"scripts/{script}.py", "--check"], cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
