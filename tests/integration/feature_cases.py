"""Features of a run that are tried two at a time: what switches each on, and what it promises beside any other."""

from __future__ import annotations

import itertools
import json
from typing import Any, Final

from feature_promises import (
    LR,
    Feature,
    as_engine,
    each,
    ended_early,
    from_first_policy,
    schedule,
    stopped,
    trained,
    weighted,
)


def optimization(name: str) -> Feature:
    return Feature(f"`{name}`", ["--model.optimizations+", name], same="steps")


def part(name: str, /, **options: Any) -> str:
    return json.dumps({"class_path": name, "init_args": options})


SOURCE: Final = {"class_path": "FileSource", "init_args": {"path": "examples/quickstart/train.jsonl"}}
HELD_OUT: Final = {"class_path": "FileSource", "init_args": {"path": "examples/quickstart/val.jsonl"}}
RARE: Final = {"function": "parts.rare"}
PPO: Final = ["-c", "configs/algo/ppo.yaml"]
SAVER: Final = "lightning.pytorch.callbacks.ModelCheckpoint"
STREAMS: Final = ["--model.rollout", "streaming_parts.BesideTheTrainer", "--model.algorithm.correction", "{}"]

BASE: Final = ["--model.num_steps", "2", "--model.rewards", f"[{part('FunctionReward', **RARE)}]"]
"""What each run has, before its features."""
AFTER: Final = ["--model.algorithm.entropy_coefficient", "0.01"]
"""What it has after them: an option of whichever algorithm they name."""

FEATURES: Final = {
    # ---- the policy, whose file comes before others -----------------------------------------------------------------
    "several turns": Feature(
        "an environment of four turns",
        [
            *("-c", "configs/hidden_digit.yaml", "--model.policy.path", "examples/hidden_digit/model"),
            *("--model.batch.prompts_per_step", "4", "--model.batch.group_size", "4", "--model.num_steps", "2"),
            *("--data.val", "{class_path: FileSource, init_args: {path: examples/hidden_digit/train.jsonl}}"),
        ],
        "trajectories have up to four turns",
        lambda rows, run: all(1 < row["turns/mean"] <= 4 for row in rows),
        of=["model.policy"],
    ),
    "router replay": Feature(
        "a mixture of experts, `router_replay`",
        ["--model.policy.path", "experts/model", "--model.policy.init", "pretrained", "--model.router_replay", "true"],
        "the trainer's logprobs are the engine's",
        as_engine,
        of=["model.policy"],
    ),
    # ---- what is trained ------------------------------------------------------------------------------------------
    "lora": Feature(
        "`model.lora`",
        ["--model.lora", "{rank: 2}"],
        "the adapter is exported",
        lambda rows, run: (run / "adapter").is_dir(),
        same="rollout",
        of=["model.lora"],
    ),
    "adapter to start from": Feature(
        "`model.lora.path`",
        ["--model.lora", "{rank: 2, path: lora/adapter}"],
        "the adapter is exported",
        lambda rows, run: (run / "adapter").is_dir(),
        of=["model.lora", "model.policy"],  # the adapter is of the tests' model
        after="lora",
    ),
    "kl penalty": Feature(
        "`kl_coefficient`",
        ["--model.algorithm.kl_coefficient", "0.1"],
        "the reference is the policy before its first update",
        from_first_policy,
        same="rollout",
    ),
    "critic": Feature(
        "PPO, KL in the reward", PPO, "a critic trains", each("critic/loss"), "rollout", of=["algorithm"]
    ),
    "kl in loss": Feature(
        "PPO, `kl_in: loss`",
        [*PPO, "--model.algorithm.kl_in", "loss", "--model.algorithm.kl_coefficient", "0.1"],
        "the reference is the policy before its first update",
        from_first_policy,
        same="rollout",
        of=["algorithm"],
    ),
    "critic on trunk": Feature(
        "PPO, `critic.share_trunk`",
        [*PPO, "--model.critic.share_trunk", "true"],
        "a critic trains",
        each("critic/loss"),
        same="rollout",
        of=["algorithm"],
    ),
    "critic warm-up": Feature(
        "PPO, `critic.warmup_steps: 1`",
        [*PPO, "--model.critic.warmup_steps", "1"],
        "the policy trains in the second step alone",
        lambda rows, run: ["policy/lr" in row for row in rows] == [False, True],
        same="rollout",
        of=["algorithm"],
    ),
    "schedule": Feature(
        "`lr_scheduler`",
        ["--model.lr_scheduler", part("torch.optim.lr_scheduler.LinearLR", start_factor=0.5, total_iters=4)],
        "the rate of each step that trains the policy is the schedule's next one",
        schedule,
        same="rollout",
    ),
    "muon": Feature(
        "`Muon`",
        ["-c", "configs/optim/muon.yaml", "--model.optimizer.init_args.lr", str(LR)],
        same="rollout",
    ),
    # ---- what is sampled ------------------------------------------------------------------------------------------
    "curriculum": Feature(
        "`PassRateCurriculum`",
        ["--data.train", part("PassRateCurriculum", source=SOURCE)],
        "pass rates of both steps' prompts are known",
        lambda rows, run: rows[1]["curriculum/unknown"] < rows[0]["curriculum/unknown"] < 1,
        of=["data.train"],
    ),
    "mixture": Feature(
        "`MixtureSource`",
        [
            "--data.train",
            part(
                "MixtureSource", sources={"a": {"source": SOURCE, "weight": 1}, "b": {"source": HELD_OUT, "weight": 3}}
            ),
        ],
        of=["data.train"],
    ),
    "dynamic sampling": Feature(
        "DAPO",
        ["-c", "configs/algo/dapo.yaml"],
        "no group without a difference trains",
        lambda rows, run: all(row["advantages/degenerate_groups"] == 0 for row in rows),
        of=["algorithm"],
    ),
    "overlong filter": Feature(
        "DAPO, `overlong_filter`, `overlong_buffer`, no refills",
        [
            *("-c", "configs/algo/dapo.yaml", "--model.algorithm.dynamic_sampling", "false"),
            *("--model.algorithm.overlong_filter", "true", "--model.algorithm.overlong_buffer", "4"),
            *("--model.sampling.max_new_tokens", "8"),
        ],
        "completions that ended train, beside truncated ones",
        lambda rows, run: all(0 < row["completion/truncated_share"] < 1 for row in rows),
        of=["algorithm"],
    ),
    "cut distribution": Feature(
        "`top_k`, `temperature`",
        ["--model.sampling.top_k", "6", "--model.sampling.temperature", "0.8"],
        "the trainer's logprobs are the engine's",
        as_engine,
    ),
    "stop strings": Feature(
        "`sampling.stop`",
        ["--model.sampling.stop", '["3", "7"]'],
        "no text goes on after one, and some end with one",
        stopped,
    ),
    "partial rollout": Feature(
        "`partial_rollout.max_tokens_per_step`",
        ["--model.partial_rollout", "{max_tokens_per_step: 3}", "--model.algorithm.correction", "{}"],
        "trajectories go on in the next step",
        lambda rows, run: any(name.startswith("partial/") for name in rows[0]),
        of=["partial_rollout"],
    ),
    "asynchronous": Feature(
        "`partial_rollout.asynchronous`",
        [*STREAMS, "--model.partial_rollout", "{asynchronous: true, max_staleness: 1}"],
        "no group is older than `max_staleness`",
        lambda rows, run: all(row["partial/staleness_max"] <= 1 for row in rows),
        of=["partial_rollout"],
    ),
    "stop when enough": Feature(
        "`partial_rollout.over_provisioning`",
        [*STREAMS, "--model.partial_rollout", "{over_provisioning: 1.5}"],
        "no group is older than `max_staleness`",
        lambda rows, run: all(row["partial/staleness_max"] <= 2 for row in rows),
        of=["partial_rollout"],
    ),
    # ---- rewards --------------------------------------------------------------------------------------------------
    "scaled reward": Feature(
        "`ScaledReward`, `scale: running`",
        [
            "--model.rewards",
            f"[{part('ScaledReward', scale='running', reward=json.loads(part('FunctionReward', **RARE)))}]",
        ],
        same="rollout",
        of=["model.rewards"],
    ),
    "two rewards": Feature(
        "two rewards with weights",
        [
            "--model.rewards",
            f"[{part('FunctionReward', name='first', weight=0.75, **RARE)}, "
            f"{part('FunctionReward', name='second', weight=0.25, **RARE)}]",
        ],
        "the reward is their weighted sum",
        weighted,
        of=["model.rewards"],
    ),
    # ---- passes of the trainer ------------------------------------------------------------------------------------
    "mini-batches": Feature(
        "`mini_batch_size`, `num_epochs`",
        ["--model.batch.mini_batch_size", "8", "--model.batch.num_epochs", "2"],
        "later updates are off-policy",
        lambda rows, run: all(row["policy/ratio_max"] > 1 + 1e-4 for row in trained(rows)),
        same="rollout",
    ),
    "token budget": Feature("`max_tokens_per_gpu`", ["--model.batch.max_tokens_per_gpu", "64"], same="steps"),
    "prompt for each": Feature("`share_prefixes: false`", ["--model.batch.share_prefixes", "false"], same="steps"),
    "padded trainer": Feature("`PaddedTrainer`", ["--model.trainer", "PaddedTrainer"], same="steps"),
    "chunked entropy": optimization("EntropyChunking"),
    "entropy checkpointing": optimization("EntropyCheckpointing"),
    "gradient checkpointing": optimization("GradientCheckpointing"),
    "selective checkpointing": optimization("SelectiveCheckpointing"),
    "fused logprobs": optimization("FusedLogprobs"),
    "offload": Feature(
        "`memory.offload: optimizer_and_weights`",
        ["--model.memory.offload", "optimizer_and_weights"],
        "state is moved",
        lambda rows, run: rows[1]["offload/gib"] > 0,
        same="numbers",
    ),
    "sharded": Feature(
        "FSDP2 on two ranks",
        ["--trainer.devices", "2"],
        same="steps",
        of=["trainer.devices"],
        num_ranks=2,
    ),
    "sequence parallelism": Feature(
        "Ulysses on two ranks",
        ["--trainer.devices", "2", "--trainer.strategy.init_args.sequence", "2"],
        same="steps",
        of=["trainer.devices"],
        num_ranks=2,
    ),
    # ---- the run --------------------------------------------------------------------------------------------------
    "validation": Feature(
        "`validation.every_n_steps: 1`",
        ["--model.validation.every_n_steps", "1"],
        "each step is validated",
        each("validate/reward_mean"),
        same="numbers",
        of=["model.validation"],
    ),
    "held-out sets, sampled": Feature(
        "`data.val` of two sources, `num_samples: 2`",
        [
            *("--model.validation.every_n_steps", "1", "--model.validation.num_samples", "2"),
            *("--model.validation.sampling.temperature", "0.7", "--data.val"),
            part("MixtureSource", sources={"a": {"source": HELD_OUT}, "b": {"source": HELD_OUT}}),
        ],
        "each step is validated, each set by itself",
        each("validate/a/reward_mean", "validate/b/reward_mean", "validate/pass@2"),
        same="numbers",
        of=["model.validation"],
    ),
    "background checkpoints": Feature(
        "`checkpoint.asynchronous`",
        ["--checkpoint.asynchronous", "true", "--checkpoint.every_n_steps", "1"],
        "the last checkpoint is whole",
        lambda rows, run: (run / "checkpoints" / "step-00000002" / "manifest.json").is_file(),
        same="numbers",
    ),
    "resume": Feature(
        "`--resume` from the first step",
        ["--checkpoint.every_n_steps", "1"],
        "the second step is the undisturbed run's",
        same="numbers",
        resumes=True,
        of=["resume"],
    ),
    "killed": Feature(
        "SIGKILL in the second step, `--resume`",
        ["--checkpoint.every_n_steps", "1", "--trainer.callbacks+", "parts.KilledInSecondStep"],
        same="numbers",
        killed_as="resume",
        of=["resume"],
    ),
    "early end": Feature(
        "`EarlyStopping`",
        [
            *("--model.num_steps", "9", "--trainer.callbacks+"),
            part("lightning.pytorch.callbacks.EarlyStopping", monitor="rollout/restarts", patience=1),
        ],
        "the run says after which step it ended, and keeps it",
        ended_early,
        same="numbers",
    ),
    "longest time": Feature(
        "`trainer.max_time`",
        [
            *("--model.num_steps", "9", "--trainer.max_time", "00:01:00:00"),
            *("--trainer.callbacks+", "parts.TimePassesInSecondStep"),
        ],
        "the run says after which step it ended, and keeps it",
        ended_early,
        same="numbers",
    ),
    "best policy": Feature(
        "`ModelCheckpoint` by a metric",
        ["--trainer.callbacks+", part(SAVER, monitor="reward/mean", mode="max")],
        "a policy is kept",
        lambda rows, run: any((run / "best").iterdir()),
        same="numbers",
    ),
    "last policy": Feature(
        "`ModelCheckpoint`",
        ["--trainer.callbacks+", SAVER],
        "the last policy is kept",
        lambda rows, run: [path.stem for path in (run / "best").glob("epoch=0-step=2*.ckpt")] == ["epoch=0-step=2"],
        same="numbers",
    ),
}
"""Features by name."""

PAIRS: Final = [
    (one, other)
    for one, other in itertools.combinations(FEATURES, 2)
    if not {*FEATURES[one].of} & {*FEATURES[other].of}
    # the first step's checkpoint gets its name at the end of the second, in which the run is killed
    if {one, other} != {"background checkpoints", "killed"}
]

TIMED: Final = {"asynchronous", "stop when enough"}
"""Features with which the groups of a step depend on time, so that no two runs have the same."""

NO_REPLAY: Final = "BesideTheTrainer lacks. Engines here that can: HFRollout"
IN_CHUNKS: Final = "FusedLogprobs computes entropies in chunks already. Remove one of the two."
RECOMPUTES: Final = "FusedLogprobs recomputes what entropies need already. Remove one of the two."
SAME_BLOCKS: Final = "both decide what the same blocks recompute. Remove one of the two."
REFUSED: Final = {
    frozenset({"router replay", "asynchronous"}): NO_REPLAY,
    frozenset({"router replay", "stop when enough"}): NO_REPLAY,
    frozenset({"padded trainer", "sequence parallelism"}): "PaddedTrainer does not support: set it to 1, or",
    frozenset({"router replay", "padded trainer"}): "PaddedTrainer cannot replay experts: remove it, or",
    frozenset({"chunked entropy", "fused logprobs"}): IN_CHUNKS,
    frozenset({"entropy checkpointing", "fused logprobs"}): RECOMPUTES,
    frozenset({"gradient checkpointing", "selective checkpointing"}): SAME_BLOCKS,
}
"""Pairs that a run refuses before a model is loaded, and what the message names."""
