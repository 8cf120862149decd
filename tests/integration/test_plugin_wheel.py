"""A third party's plugin, installed from its wheel beside wheels of rlplug: all its hooks work in a real run.

``tests/plugins/rlplug_probe`` implements every hook and leaves evidence of each in the run folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import yaml
from distributions import ROOT, plugin_distributions
from safetensors.torch import load_file
from try_distributions import differences
from wheel_environment import PROBE, WheelEnvironment

from rlplug.hookspecs import SINCE
from rlplug.models.config import ModelConfig
from rlplug.models.loading import load_model
from rlplug.observability.metrics_log import read_metrics
from rlplug.plugin_names import plugin_index

Results: TypeAlias = dict[str, subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.nightly  # a minute; a push has tests of each hook, and test_distributions.py of the wheels
LOADED = ["rlplug", *sorted(["probe", *(name for d in plugin_distributions() for name in d.plugins)])]
"""Names of all plugins, in the order in which they are listed."""
NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 2, 4, 4
SHORT_WEIGHT = 0.5

SMALL = {
    "model": {
        "batch": {
            "prompts_per_step": PROMPTS_PER_STEP,
            "group_size": GROUP_SIZE,
            "micro_batch_size_per_gpu": 8,
        },
        "num_steps": NUM_STEPS,
        "validation": {"every_n_steps": None, "at_start": False},
    },
    "run": {"report": False},
}
EVERYTHING = {
    "model": {
        "policy": {"path": "probe_model"},
        "algorithm": {"class_path": "MeanBaseline"},
        "rewards": [
            {"class_path": "FunctionReward", "init_args": {"function": "examples.quickstart.reward.digits_in_place"}},
            {"class_path": "ShortReward", "init_args": {"weight": SHORT_WEIGHT}},
        ],
        "trainer": {"class_path": "ProbeTrainer"},
        "rollout": {"class_path": "SleepyRollout"},
        "optimizations": [{"class_path": "FreezeEmbeddings"}],
        "memory": {"sleep_between_rollouts": True},
    },
    "data": {"train": {"class_path": "Sevens", "init_args": {"path": "examples/quickstart/train.jsonl"}}},
    "run": {"dir": "runs/everything"},
}
VALIDATED = ("--model.validation.at_start", "true", "--model.validation.every_n_steps", "1")


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> WheelEnvironment:
    """All wheels and the probe's in a new virtual environment that does not see the sources."""
    made = WheelEnvironment.make(tmp_path_factory.mktemp("environment"), dist)
    made.install("rlplug[full]", *(each.name for each in plugin_distributions()), PROBE.name)
    return made


@pytest.fixture(scope="module")
def folder(environment: WheelEnvironment) -> Path:
    """The user's folder, with a model whose tokenizer the probe makes, and two configurations."""
    folder = environment.folder
    shutil.copytree(folder / "examples/quickstart/model", folder / "probe_model")
    (folder / "probe_model/made_by_probe").touch()
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    (folder / "everything.yaml").write_text(yaml.safe_dump(EVERYTHING))
    return folder


@pytest.fixture(scope="module")
def results(environment: WheelEnvironment, folder: Path) -> Results:
    """All processes of this file. Where a plugin is blocked, nothing may have imported it before."""
    fit = ("fit", "-c", "quickstart.yaml", "-c", "small.yaml")
    commands = {
        "everything": (*fit, "-c", "everything.yaml"),
        "validated": (*fit, "-c", "everything.yaml", *VALIDATED, "--run.dir", "runs/validated"),
        "no effect": (*fit, "--model.optimizations+=NoEffect", "--run.dir", "runs/no_effect"),
        "sleepless": (*fit, "--model.memory.sleep_between_rollouts", "true", "--run.dir", "runs/sleepless"),
        "without algos": (*fit, "--block", "algos"),
        "plugins": ("plugins", "--check", "--json"),
        "plugins without probe": ("plugins", "--check", "--json", "--block", "probe"),
    }
    return {
        name: (environment.run if name in ("plugins", "without algos") else environment.run_forked)("rlplug", *command)
        for name, command in commands.items()
    }


@pytest.fixture(scope="module")
def initial_weights() -> dict[str, torch.Tensor]:
    """The quickstart's random policy as the run starts from it."""
    path = str(ROOT / "examples/quickstart/model")
    return dict(load_model(ModelConfig(path, init="random", dtype="float32")).state_dict())


@pytest.fixture(scope="module")
def everything(folder: Path, results: Results) -> Path:
    """The folder of the run that uses all that the probe brings."""
    assert results["everything"].returncode == 0, results["everything"].stderr
    return folder / "runs/everything/001"


@pytest.fixture(scope="module")
def rows(everything: Path) -> list[dict[str, float]]:
    """The run's metrics, a row a step."""
    rows = read_metrics(everything / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    return rows


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


# ---- what is loaded -----------------------------------------------------------------------------------------------


def test_plugins_come_from_the_wheels_and_list_what_they_bring(environment, results):
    assert results["plugins"].returncode == 0, results["plugins"].stderr
    records = json.loads(results["plugins"].stdout)
    assert [record["name"] for record in records] == LOADED
    assert {record["state"] for record in records} == {"loaded"}
    assert not list(differences(records, plugin_index(), environment.root))
    files = [Path(record.pop("file")) for record in records]
    assert all(file.is_relative_to(environment.root) for file in files), files
    (probe,) = [record for record in records if record["name"] == "probe"]
    assert probe == {
        "name": "probe",
        "distribution": "rlplug-probe",
        "version": "3.1.4",
        "api_range": ">=3.1,<4",
        "registers": [
            "algorithms/MeanBaseline",
            "classes/Sevens",
            "environments/Echo",
            "launchers/ProbeLauncher",
            "optimizations/FreezeEmbeddings",
            "optimizations/NoEffect",
            "rewards/ShortReward",
            "rollouts/SleepyRollout",
            "trainers/ProbeTrainer",
        ],
        "hooks": sorted(SINCE),
        "state": "loaded",
        "reason": "",
    }


def test_the_wheels_have_the_commands_of_the_index(environment):
    for distribution in metadata.distributions(path=[str(environment.site)]):
        if (known := plugin_index().get(distribution.name)) is None:
            continue
        assert sorted(distribution.entry_points.select(group="rlplug.commands").names) == known["commands"]


def test_a_blocked_plugin_brings_nothing(results):
    assert results["plugins without probe"].returncode == 0, results["plugins without probe"].stderr
    records = json.loads(results["plugins without probe"].stdout)
    (probe,) = [record for record in records if record["name"] == "probe"]
    assert (probe["name"], probe["version"], probe["state"]) == ("probe", "3.1.4", "blocked")
    assert (probe["registers"], probe["hooks"]) == ([], [])


# ---- a run with everything ----------------------------------------------------------------------------------------


def test_run_record_names_plugins_and_effects(folder, everything):
    record = json.loads((everything / "run.json").read_text())
    assert record["status"] == "finished"
    assert [(plugin["name"], plugin["state"]) for plugin in record["plugins"]] == [(name, "loaded") for name in LOADED]
    assert record["versions"]["rlplug-probe"] == "3.1.4"
    config = json.loads((folder / "probe_model/config.json").read_text())
    num_values = config["vocab_size"] * config["hidden_size"]
    assert record["effects"] == [
        "the probe's trainer: weights drawn with seed 0, block by block",
        f"froze {num_values} values of the input embeddings",
    ]
    of_cache = "run.compile_cache is not used; TORCHINDUCTOR_CACHE_DIR of the environment is "
    assert record["compile_cache"].startswith(of_cache)


def test_run_record_has_the_cost_of_each_hook(everything):
    """Catches a hook that is not measured, and one that is counted in another phase."""
    costs = {
        (cost["hook"], cost["phase"]): cost
        for cost in json.loads((everything / "run.json").read_text())["hook_costs"]
        if cost["plugin"] == "probe"
    }
    assert {key: cost["calls"] for key, cost in costs.items()} == {
        ("make_observer", "between phases"): 1,
        ("make_tokenizer", "between phases"): 1,
        ("make_source", "between phases"): 1,
        ("make_token_log", "between phases"): 1,
        ("make_experiment_log", "between phases"): 1,
        ("after_rollout", "logprobs"): NUM_STEPS,
        ("sync_weights", "sync"): NUM_STEPS,
        ("prepare_batch", "advantages"): NUM_STEPS,
        ("compute_loss", "update"): NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE // 8,
        ("after_update", "between phases"): NUM_STEPS,
    }
    assert all(0 < cost["seconds"] < 60 for cost in costs.values())


def test_optimization_takes_effect(everything, initial_weights):
    trained = load_file(everything / "policy/model.safetensors")
    unchanged = [name for name, tensor in initial_weights.items() if torch.equal(trained[name], tensor)]
    assert unchanged == ["model.embed_tokens.weight"]


def test_registered_algorithm_trains(rows):
    assert all(row["advantages/magnitude"] > 0 for row in rows)
    assert all("advantages/degenerate_groups" not in row for row in rows)  # GRPO's, which the quickstart names


def test_registered_reward_counts_beside_the_quickstarts(everything):
    samples = samples_of(everything)
    assert samples
    for sample in samples:
        assert sample["rewards"].keys() == {"digits_in_place", "shortreward"}
        assert sample["rewards"]["shortreward"] == pytest.approx(1 / sample["num_tokens"])
        weighted = sample["rewards"]["digits_in_place"] + SHORT_WEIGHT * sample["rewards"]["shortreward"]
        assert sample["reward"] == pytest.approx(weighted)


def test_registered_engine_sleeps_between_rollouts(rows):
    """It also sleeps at the start of the run, and is asked for its counters while it sleeps."""
    assert [(row["rollout/wakes"], row["rollout/sleeps"]) for row in rows] == [(1, 2), (2, 3)]
    assert all(row["mismatch/max"] < 1e-4 for row in rows)  # the engine that woke has the trainer's weights


def test_observation_hooks_see_the_step_and_add_metrics(rows):
    for row in rows:
        assert row["probe/rollout_samples"] == PROMPTS_PER_STEP * GROUP_SIZE
        assert row["probe/seen_loss"] == row["loss"] != 0


def test_observer_sees_the_run(everything, rows, results):
    witness = json.loads((everything / "witness.json").read_text())
    assert (witness["stage"], witness["validated"], witness["exported"]) == ("fit", [], ["policy"])
    assert [step["step"] for step in witness["steps"]] == [1, 2]
    for step, row in zip(witness["steps"], rows, strict=True):
        assert step["of_samples"] == pytest.approx(step["metric"], rel=1e-5)
        assert step["metric"] == pytest.approx(row["reward/mean"])
    assert "the probe saw 2 steps" in results["everything"].stdout


def test_source_that_yaml_names_without_a_module_gives_the_prompts(everything):
    assert {sample["prompt"][0] for sample in samples_of(everything)} == {"7"}


def test_wrapped_sync_reports_what_the_wrapper_returns(rows, initial_weights):
    num_bytes = sum(tensor.nbytes for tensor in initial_weights.values())
    for row in rows:
        assert row["sync/gib"] * 2**30 == 2 * num_bytes
        assert row["probe/synced_bytes"] == row["step"] * num_bytes
        assert row["probe/syncs"] == row["step"]


def test_wrapped_batch_reaches_the_loss(rows):
    for row in rows:
        assert row["probe/advantage_in_loss"] == pytest.approx(0.5 * row["advantages/magnitude"], rel=1e-5)


def test_resolver_makes_the_tokenizer_it_is_asked_for(rows, results):
    assert [row["probe/tokenizers"] for row in rows] == [1, 1]
    # the other runs name a model without the marker: the probe passed, and the core made their tokenizer
    assert "took no effect" in results["no effect"].stderr


def test_resolver_makes_the_source_of_groups(rows):
    assert [row["probe/source_steps"] for row in rows] == [1, 2]


# ---- runs that must stop ------------------------------------------------------------------------------------------


def test_optimization_without_effect_stops_the_run(folder, results):
    assert results["no effect"].returncode == 2
    message = "NoEffect took no effect on the policy, examples/quickstart/model: remove it from model.optimizations."
    assert f"rlplug: {message}" in results["no effect"].stderr
    run = folder / "runs/no_effect/001"
    assert not (run / "metrics.jsonl").exists()
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


def test_sleep_asked_of_an_engine_that_cannot_names_one_that_can(results):
    assert results["sleepless"].returncode == 2
    (message,) = [line for line in results["sleepless"].stderr.splitlines() if line.startswith("rlplug: ")]
    assert "model.memory.sleep_between_rollouts" in message
    assert "HFRollout lacks" in message
    assert message.endswith("Engines here that can: SGLangRollout, SleepyRollout, TRTLLMRollout.")


def test_algorithm_of_a_blocked_plugin_names_the_package(results):
    assert results["without algos"].returncode == 2
    assert (
        "It comes with rlplug-algos: plugin 'algos' is blocked: drop --block algos." in results["without algos"].stderr
    )
    assert "rlplug-algos" in results["without algos"].stderr
    assert "usage:" not in results["without algos"].stderr


def test_engine_that_slept_is_synced_again_at_the_same_version(results):
    assert results["validated"].returncode == 0, results["validated"].stderr


def test_hooks_of_one_step_get_one_number(rows):
    for row in rows:
        assert row["probe/rollout_step"] == row["probe/batch_step"] == row["probe/update_step"]
