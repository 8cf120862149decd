"""Wrong configurations, generated: each ends in one message that names its key, before a model is loaded."""

from __future__ import annotations

import re

import pytest
from wrong_command_lines import faults

LEGAL = {
    "blank|null": r"accelerator|callbacks|chat|clip_dual|correction|critic|devices|environment|foreach|fused|kl_target"
    r"|limit|logger|lr_scheduler|max_grad_norm|max_prompt_tokens|max_time|max_tokens_per_gpu\w*|max_tokens_per_turn"
    r"|micro_batch_size_per_gpu|mini_batch_size|mismatch_gate|name|num_epochs|num_steps|optimizer|partial_rollout"
    r"|plugins|process_group_backend|reference|reward_scale|rewards|rollout|system_prompt|trunk|val|value_clip"
    r"|every_n_steps|dtype|steps|ckpt_path|phase_deadline_s|compile_cache|weights_only|benchmark|deterministic|enable_progress_bar|optimizations|keep",
    "true|0": r".*",
    "empty block|empty list": r"init_args|correction|critic|callbacks|optimizations|plugins|keep|rewards"
    r"|trainer|run|checkpoint|profile|batch|sampling|turns|validation|weight_sync|memory|limits"
    r"|columns|curriculum|logger|lora|optimizer|strategy",
    "1e-30": r"alpha|clip_\w+|correction|epsilon|eps|entropy_coefficient|\w+_coefficient|gae_lambda|gamma|kl_target|lr"
    r"|ratio_min|k3_max|top_p|pass_threshold|\w*lambda|max_reward_error_share|positive_reward|value_clip|weight|weight_decay|momentum",
    "-1": r"entropy_coefficient|pass_threshold|positive_reward|weight|devices|max_epochs|max_steps",
    "1e9": r"seed|seed_everything|limit|pass_threshold|token_log_mib",
    "text|bracket|empty text|surrogate|long text": r"dir|system_prompt|instruction|split|name"
    r"|compile_cache|attn_implementation",  # of the last transformers says what it is not when it builds the model
    "bom": "",
}
"""Expressions for changes, and for the keys (the last part) that may take them."""


TABLE = "config_mutations.py"


def is_legal(case: str) -> bool:
    _, key, change = case.split(": ", 2)
    last = key.rpartition(".")[2] if key != "(file)" else ""
    return any(re.fullmatch(changes, change) and re.fullmatch(names, last) for changes, names in LEGAL.items())


def test_a_sample_of_wrong_configurations() -> None:
    """Alone catches a key whose new type, range or form jsonargparse, Lightning or torch reports in its own way.

    Of the quickstart and one algorithm: those of all algorithms are resolved and changed every night.
    """
    tried, bad = faults(TABLE, is_legal, "--bases", "", "ppo", "--share", "0.002", "--seed", "1", timeout=120)

    assert tried > 4
    assert not bad, "\n".join(bad)


def test_every_wrong_file() -> None:
    """Alone catches a file that is read without a limit, or in another encoding, or with a key twice."""
    tried, bad = faults(TABLE, is_legal, "--bases", "", "--match", r"\(file\)", timeout=120)

    assert tried > 25
    assert not bad, "\n".join(bad)


@pytest.mark.nightly
@pytest.mark.timeout(3660)
@pytest.mark.parametrize("part", range(8))
def test_every_wrong_configuration(part: int) -> None:
    """In parts, of 12 minutes of a core each: a night that is cut short says how far it came."""
    tried, bad = faults(TABLE, is_legal, "--part", str(part), "8", timeout=3600)

    assert tried > 1000
    assert not bad, "\n".join(bad)
