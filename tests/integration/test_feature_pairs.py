"""Each two features of a run, and each documented value, in two steps: what one promises holds beside the other.

A feature's promise is checked in each of its pairs, so a new feature is a line of :data:`FEATURES`, and what two refuse
together a line of :data:`REFUSED`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import SMALL, Job, run_job, samples
from experts_model import make_experts_model

from rlplug.cli.configuration.option_checks import SECTIONS
from rlplug.observability.metrics_log import read_metrics
from rlplug.plugin_manager import plugins
from rlplug.types.ranges import hints_of

RUN = [*SMALL, "--model.num_steps", "2"]
LR = 5e-4
"""The quickstart's."""
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Feature:
    arguments: Sequence[str]
    promise: Callable[[Rows, Path], bool] = lambda rows, run: True
    """Whether the two rows of metrics and the run's folder are as they should be."""
    resumes: bool = False
    """Whether the second step is taken again, from the checkpoint of the first."""


def _schedule(rows: Rows, run: Path) -> bool:
    """Return whether the rate of each step that trains the policy is the schedule's next one."""
    found = [row["policy/lr"] for row in rows if "policy/lr" in row]
    return found == pytest.approx([LR * (0.5 + 0.125 * step) for step in range(len(found))])


def _ended_early(rows: Rows, run: Path) -> bool:
    """Return whether the run says that it ended after the second step of nine, and kept it."""
    message = json.loads((run / "run.json").read_text())["message"]
    return (run / "checkpoints" / "step-00000002").is_dir() and message.startswith("ended after step 2 of 9")


FEATURES = {
    "lora": Feature(["--model.lora", "{rank: 2}"], lambda rows, run: (run / "adapter").is_dir()),
    "kl penalty": Feature(
        ["--model.algorithm.kl_coefficient", "0.1"],
        # of the first policy: that of its own updates
        lambda rows, run: abs(rows[0].get("policy/kl", 0.0)) < 1e-6 + 2 * rows[0].get("policy/approx_kl", 0.0),
    ),
    "critic": Feature(["-c", "configs/algo/ppo.yaml"], lambda rows, run: all("critic/loss" in row for row in rows)),
    "critic warm-up": Feature(
        ["-c", "configs/algo/ppo.yaml", "--model.critic.warmup_steps", "1"],
        lambda rows, run: ["policy/lr" in row for row in rows] == [False, True],
    ),
    "schedule": Feature(
        [
            "--model.lr_scheduler",
            '{"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"start_factor": 0.5, "total_iters": 4}}',
        ],
        _schedule,
    ),
    "curriculum": Feature(
        [
            "--data.train",
            '{"class_path": "PassRateCurriculum", "init_args": {"source": {"class_path": "FileSource", "init_args": '
            '{"path": "examples/quickstart/train.jsonl"}}}}',
        ],
        lambda rows, run: rows[1]["curriculum/unknown"] < rows[0]["curriculum/unknown"] < 1,
    ),
    "validation": Feature(
        ["--model.validation.every_n_steps", "1"], lambda rows, run: all("validate/reward_mean" in row for row in rows)
    ),
    "dynamic sampling": Feature(
        ["-c", "configs/algo/dapo.yaml", "--model.algorithm.overlong_buffer", "2"],
        lambda rows, run: all("filter/refills" in row for row in rows),
    ),
    "partial rollout": Feature(
        ["--model.partial_rollout", "{max_tokens_per_step: 3}", "--model.algorithm.correction", "{}"],
        lambda rows, run: any(name.startswith("partial/") for name in rows[0]),
    ),
    "mini-batches": Feature(["--model.batch.mini_batch_size", "2", "--model.batch.num_epochs", "2"]),
    "token budget": Feature(["--model.batch.max_tokens_per_gpu", "64"]),
    "chunked entropy": Feature(["--model.optimizations+", "EntropyChunking"]),
    "entropy checkpointing": Feature(
        ["--model.optimizations+", "EntropyCheckpointing", "--model.algorithm.entropy_coefficient", "0.01"]
    ),
    "gradient checkpointing": Feature(["--model.optimizations+", "GradientCheckpointing"]),
    "scaled reward": Feature(
        [
            "--model.rewards",
            '[{"class_path": "ScaledReward", "init_args": {"scale": "running", "reward": {"class_path": '
            '"FunctionReward", "init_args": {"function": "examples.quickstart.reward.digits_in_place"}}}}]',
        ]
    ),
    "background checkpoints": Feature(
        ["--checkpoint.asynchronous", "true", "--checkpoint.every_n_steps", "1"],
        lambda rows, run: (run / "checkpoints" / "step-00000002").is_dir(),
    ),
    "resume": Feature(["--checkpoint.every_n_steps", "1"], resumes=True),
    "early end": Feature(
        [
            *("--model.num_steps", "9", "--trainer.callbacks+"),
            '{"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "rollout/restarts", '
            '"patience": 1}}',
        ],
        _ended_early,
    ),
    "longest time": Feature(
        [
            *("--model.num_steps", "9", "--trainer.max_time", "00:01:00:00"),
            *("--trainer.callbacks+", "parts.TimePassesInSecondStep"),
        ],
        _ended_early,
    ),
    "asynchronous": Feature(
        [
            *("--model.rollout", "streaming_parts.BesideTheTrainer", "--model.algorithm.correction", "{}"),
            *("--model.partial_rollout", "{asynchronous: true, max_staleness: 1}"),
        ],
        lambda rows, run: all(row["partial/staleness_max"] <= 1 for row in rows),
    ),
    "several turns": Feature(
        [
            *("-c", "configs/hidden_digit.yaml", *SMALL[3:], "--model.num_steps", "2"),
            *("--model.policy.path", "examples/hidden_digit/model"),
            *("--data.val", "{class_path: FileSource, init_args: {path: examples/hidden_digit/train.jsonl}}"),
        ],
        lambda rows, run: all(1 < row["turns/mean"] <= 4 for row in rows),
    ),
    "router replay": Feature(
        ["--model.policy.path", "experts/model", "--model.policy.init", "pretrained", "--model.router_replay", "true"],
        lambda rows, run: all(row["mismatch/mean"] < 1e-4 for row in rows),
    ),
    "best policy": Feature(
        [
            "--trainer.callbacks+",
            '{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"monitor": "reward/mean", '
            '"mode": "max"}}',
        ],
        lambda rows, run: any((run / "best").iterdir()),
    ),
    "last policy": Feature(
        ["--trainer.callbacks+", "lightning.pytorch.callbacks.ModelCheckpoint"],
        lambda rows, run: [path.stem for path in (run / "best").glob("epoch=0-step=2*.ckpt")] == ["epoch=0-step=2"],
    ),
}
"""Features by name: what switches each on, and what it promises."""

EXACT = ("loss", "reward/mean", "completion/num_tokens")
"""Metrics that a resumed run has as the undisturbed one."""

REFUSED = {frozenset({"asynchronous", "router replay"}): "BesideTheTrainer lacks. Engines here that can: HFRollout"}
"""Pairs that a run refuses before a model is loaded, and what the message names."""

SAME_KEY = [
    *({"critic", "critic warm-up"}, {"critic", "dynamic sampling"}, {"critic warm-up", "dynamic sampling"}),
    *({"asynchronous", "partial rollout"}, {"several turns", "router replay"}),
]
"""Features that are values of one key."""
PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if set(pair) not in SAME_KEY]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a mixture of experts, which the features' ``experts/model`` stands for."""
    return str(make_experts_model(tmp_path_factory.mktemp("experts") / "model"))


@pytest.mark.parametrize(("one", "other"), samples(PAIRS, ("lora", "kl penalty"), ("critic warm-up", "schedule")))
def test_two_features_keep_their_promises(tmp_path: Path, experts: str, one: str, other: str) -> None:
    """Alone catches features that are right alone: a reference that is not the first policy, a rate that goes on."""
    ordered = sorted((one, other), key=lambda name: "-c" not in FEATURES[name].arguments)
    arguments = [word.replace("experts/model", experts) for name in ordered for word in FEATURES[name].arguments]
    result = run_job(Job([*RUN, *arguments, "--run.dir", str(tmp_path)]), tmp_path / "log")
    if named := REFUSED.get(frozenset((one, other))):
        assert result.exit_code == 2, result.output[-3000:]
        assert named in result.message
        return
    assert result.exit_code == 0, result.output[-3000:]
    rows = read_metrics(tmp_path / "001" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    for name in (one, other):
        assert FEATURES[name].promise(rows, tmp_path / "001"), (name, rows)
    if any(FEATURES[name].resumes for name in (one, other)):
        first = tmp_path / "001" / "checkpoints" / "step-00000001"
        result = run_job(Job(["fit", "--resume", str(tmp_path / "001"), "--ckpt_path", str(first)]), tmp_path / "log")
        assert result.exit_code == 0, result.output[-3000:]
        again = read_metrics(tmp_path / "001" / "metrics.jsonl")
        assert [row["step"] for row in again] == [1, 2]
        for name in (one, other):
            assert FEATURES[name].promise(again, tmp_path / "001"), (name, again)
        if "asynchronous" not in (one, other):  # what it generates depends on time
            assert {name: again[1][name] for name in EXACT} == {name: rows[1][name] for name in EXACT}


# ---- every documented value ------------------------------------------------------------------------------------------


def documented(key: str, owner: Any) -> Iterator[tuple[str, str]]:
    """Yield the key and each value of the options of a class that list their values, and of the blocks in it."""
    options = inspect.signature(owner).parameters
    for name, hint in hints_of(owner).items():
        for choice in _choices(hint) if name in options else ():
            if typing.get_origin(choice) is typing.Literal:
                yield from ((f"{key}.{name}", str(value)) for value in typing.get_args(choice))
            elif choice is bool:
                yield from ((f"{key}.{name}", value) for value in ("true", "false"))
            elif inspect.isclass(choice) and dataclasses.is_dataclass(choice):
                yield from documented(f"{key}.{name}", choice)


def _choices(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, without annotations."""
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    members = typing.get_args(hint) if "Union" in type(hint).__name__ else ()
    for member in members or (hint,):
        yield from _choices(member) if member is not hint else (hint,)


def values() -> list[tuple[str, str]]:
    """Return every documented value of the sections of a configuration, and of GRPO's and PPO's options."""
    found = [
        each for section, owner in SECTIONS.items() if section not in OTHERS for each in documented(section, owner)
    ]
    for algorithm in plugins().registry.each("algorithms"):
        if algorithm.__name__ in BY_ALGORITHM:
            found += documented("model.algorithm", algorithm)
    return sorted(set(found) - UNTRIED.keys())


OTHERS = ("trainer", "seed_everything")  # Lightning's own
BY_ALGORITHM = ("GRPO", "PFPPO")
UNTRIED = {
    ("model.policy.init", "pretrained"): "the tests' model has no weights",
    ("model.critic.trunk.init", "pretrained"): "likewise",
    ("model.reference.init", "pretrained"): "likewise",
    ("model.weight_sync.dtype", "fp8_block"): "needs an engine with FP8; plugins of engines try it",
    ("model.weight_sync.power_of_two_scales", "true"): "likewise",
    ("model.weight_sync.power_of_two_scales", "false"): "likewise",
    ("model.lora.sync", "adapters"): "needs an engine that serves adapters",
    ("model.router_replay", "true"): "needs a mixture of experts: test_experts.py",
    ("model.memory.sleep_between_rollouts", "true"): "needs an engine that sleeps",
    ("model.partial_rollout.asynchronous", "true"): "test_asynchronous_runs.py",
    ("model.validation.beside_training", "true"): "likewise",
    ("data.chat", "true"): "the tests' tokenizer has no chat template",
    ("data.continue_final_message", "true"): "likewise",
    ("profile.tool", "memory"): "needs a GPU",
    ("profile.tool", "nsys"): "needs nsys",
}
"""Values that are not tried here, and why."""
BESIDE = {
    "model.critic": ["-c", "configs/algo/ppo.yaml"],
    "model.critic.trunk": [
        *("-c", "configs/algo/ppo.yaml", "--model.critic.trunk.path", "tests/model"),
        *("--model.critic.trunk.init", "random"),
    ],
    "model.reference": [
        *("--model.algorithm.kl_coefficient", "0.1", "--model.reference.path", "tests/model"),
        *("--model.reference.init", "random"),
    ],
    "model.partial_rollout": [
        *("--model.partial_rollout.max_tokens_per_step", "3", "--model.algorithm.correction", "{}"),
    ],
    "model.lora": ["--model.lora.rank", "2"],
    "model.algorithm.kl_estimator": ["--model.algorithm.kl_coefficient", "0.1"],
    "model.algorithm.kl_in": ["-c", "configs/algo/pf_ppo.yaml"],
    "model.algorithm.whiten_advantages": ["-c", "configs/algo/pf_ppo.yaml"],
    "model.algorithm.keep": ["-c", "configs/algo/pf_ppo.yaml"],
    "profile": ["--profile.steps", "2"],
}
"""What a key needs beside it, by the key or what it begins with."""


@pytest.mark.parametrize(("key", "value"), samples(values(), ("model.batch.share_prefixes", "false")))
def test_a_documented_value_trains(tmp_path: Path, key: str, value: str) -> None:
    """Alone catches a value of the documentation that ends a run after its first rollout is paid for."""
    beside = [arguments for start, arguments in BESIDE.items() if f"{key}.".startswith(f"{start}.")]
    words = [word for arguments in beside[-1:] for word in arguments]
    result = run_job(Job([*RUN, *words, f"--{key}", value, "--run.dir", str(tmp_path)]), tmp_path / "log")
    assert result.exit_code == 0, result.output[-3000:]
    rows = read_metrics(tmp_path / "001" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    json.dumps(rows, allow_nan=False)
