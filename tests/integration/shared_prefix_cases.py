"""What shared prefixes are combined with: arguments of a run, and words of its line where they are not shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Combination:
    """What stands beside ``model.batch.share_prefixes`` in a run of two steps."""

    what: str
    """For the table of the docs"""
    arguments: Sequence[str] = ()
    num_ranks: int = 1
    why_not: str = ""
    """Part of the line of a run whose completions have a prompt each; empty where they share it"""


def optimization(name: str) -> list[str]:
    return ["--model.optimizations+", name]


TWO: Final = ["--trainer.devices", "2"]
MESH: Final = "--trainer.strategy.init_args"
PPO: Final = ["-c", "configs/algo/ppo.yaml"]
GAME: Final = [
    *("-c", "configs/hidden_digit.yaml", "--model.batch.prompts_per_step", "4"),
    *("--model.batch.group_size", "4", "--model.num_steps", "2"),
]

COMBINATIONS: Final = {
    "alone": Combination("nothing else"),
    "checkpointing": Combination("`GradientCheckpointing`", optimization("GradientCheckpointing")),
    "selective": Combination("`SelectiveCheckpointing`", optimization("SelectiveCheckpointing")),
    "fused": Combination("`FusedLogprobs`", optimization("FusedLogprobs")),
    "chunked": Combination(
        "`EntropyChunking`", [*optimization("EntropyChunking"), "--model.algorithm.entropy_coefficient", "0.01"]
    ),
    "adapters": Combination("`model.lora`", ["--model.lora", "{rank: 2}"]),
    "reference": Combination("a reference model", ["--model.algorithm.kl_coefficient", "0.1"]),
    "critic": Combination("a critic", PPO),
    "trunk": Combination("a critic on the policy's trunk", [*PPO, "--model.critic", "{share_trunk: true}"]),
    "budget": Combination("groups cut by `max_tokens_per_gpu`", ["--model.batch.max_tokens_per_gpu", "64"]),
    "epochs": Combination(
        "mini-batches and epochs", ["--model.batch.mini_batch_size", "8", "--model.batch.num_epochs", "2"]
    ),
    "shards": Combination("FSDP2 on two ranks", TWO, num_ranks=2),
    "replicas": Combination("replicas (HSDP)", [*TWO, f"{MESH}.replicate", "2"], num_ranks=2),
    "tensor": Combination("tensor parallelism", [*TWO, f"{MESH}.tensor", "2"], num_ranks=2),
    "sequence": Combination("Ulysses, `sequence`", [*TWO, f"{MESH}.sequence", "2"], num_ranks=2),
    "turns": Combination("turns of an environment", [*GAME, "--model.algorithm.entropy_coefficient", "0.01"]),
    "experts": Combination(
        "a mixture of experts",
        ["--model.policy.path", "{experts}", "--model.algorithm.entropy_coefficient", "0.01"],
    ),
    "replay": Combination(
        "`model.router_replay`",
        ["--model.policy.path", "{experts}", "--model.router_replay", "true"],
        why_not="model.router_replay replays",
    ),
    "compiled": Combination("`CompileBlocks` on a CPU", optimization("CompileBlocks"), why_not="on a CPU"),
    "titan": Combination("`TorchTitan`", ["--model.trainer", "TorchTitan"], why_not="TorchTitan does not support"),
    "hybrids": Combination("`HybridTrainer`", ["--model.trainer", "HybridTrainer"], why_not="HybridTrainer does not"),
}

UNIT: Final = "plugins/optims/tests/test_shared_prefixes.py::"
ELSEWHERE: Final = [
    (
        "tied embeddings, norms of queries and keys, windows, soft caps",
        "once",
        UNIT + "test_logprobs_and_gradients_are_those_of_whole_rows",
    ),
    ("sinks", "once", UNIT + "test_each_segment_attends_as_its_sequences_do"),
    ("`CompileBlocks`, on a GPU", "once", UNIT + "test_its_operator_is_checkpointed_and_compiled_as_any"),
    (
        "the kernels for trees, on a GPU",
        "once",
        "plugins/optims/tests/test_tree_kernels.py::test_attention_and_its_gradients_are_those_of_segments",
    ),
    (
        "`FlashAttention4`, other `attn_implementation`",
        "for each: the run says why",
        UNIT + "test_what_cannot_share_says_why",
    ),
    (
        "heads wider than 256, on a GPU",
        "for each: the run says why",
        UNIT + "test_wide_heads_share_no_prefixes_on_a_gpu",
    ),
]
"""What tests of the plugin show, without a run."""
