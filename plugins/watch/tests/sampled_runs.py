"""A run folder with samples and tokens of every kind: hostile texts, several versions, observations, damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from report_runs import write_metrics
from rlplug_watch.token_log.files import TokenLogWriter
from rlplug_watch.token_log.step_tokens import PRODUCED, ROW, TRAINED, StepTokens

HOSTILE = (
    "<script>document.title='taken'</script><b onclick=alert(1)>&amp;\x1b[31m\x00\u202eevil\u2066\u200b \ud800\u00e9"
)
"""Markup, control characters, characters that reorder or hide, and half of a surrogate pair."""


def line(step: int, index: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "phase": "train",
        "prompt_uid": f"train.jsonl:{step}",
        "prompt": f"What is {step} + {index}?",
        "completion": f"It is {step + index}",
        "answer": str(step),
        "reward": index / 4,
        "rewards": {"exact": index / 4},
        "finish_reason": "stop",
        "num_tokens": 6,
        "num_turns": 1,
        "policy_version": step - 1,
        "advantage": index / 4 - 0.5,
        "group": 0,
        "index": index,
        "has_tokens": True,
    } | changes


def write_run(folder: Path) -> None:
    """Write a run of three steps of a group of four, each with tokens."""
    folder.mkdir(parents=True)
    write_metrics(folder, [{"step": step, "reward/mean": 0.5} for step in (1, 2, 3)])
    lines = [line(step, index) for step in (1, 2, 3) for index in range(4)]
    lines[1] |= {"completion": HOSTILE, "prompt": HOSTILE, "prompt_uid": HOSTILE, "answer": {"a": HOSTILE}}
    lines[2] |= {"reward": None, "rewards": {HOSTILE: {"error": HOSTILE}}, "finish_reason": HOSTILE, "advantage": None}
    lines[3] |= {"completion": "x" * 300_000}
    former = {name: value for name, value in line(1, 0, phase="validate").items() if name in list(line(1, 0))[:10]}
    no_samples = [
        *("[]", "{}", '{"step": "1"}', "\0\0\0", "null", json.dumps(line(1, 0, reward="1")), "[" * 100_000),
        json.dumps(line(1, 0)).replace('"step": 1', '"step": 1' + "0" * 400),
    ]
    texts = [json.dumps(former), *(json.dumps(each) for each in lines[:4]), *no_samples]
    texts += [json.dumps(line(2, 9, reward=float("nan"))), *(json.dumps(each) for each in lines[4:])]
    (folder / "samples.jsonl").write_text("\n".join(texts) + '\n{"step": 3, "pha')
    writer = TokenLogWriter(folder / "tokens", 1 << 30)
    for step in (1, 2, 3):
        writer.append(step_tokens(step))


def step_tokens(step: int) -> StepTokens:
    """Four completions of six tokens: the third is an observation, the last two are of a newer policy."""
    rows = np.array([(0, index, 5, 6) for index in range(4)], ROW)
    flags = np.tile(np.array([3, 3, 0, 3, 3, PRODUCED], np.uint8), 4)
    trained = np.where(flags & TRAINED, 1.0, np.nan).astype(np.float32)
    log_ratio = np.linspace(-0.3, 0.3, 24, dtype=np.float32) * trained
    columns = {
        "token_ids": np.tile(np.arange(6, dtype=np.int32), 4),
        "flags": flags,
        "policy_versions": np.tile(np.array([0, 0, -1, 0, 1, 1], np.int32), 4),
        "advantages": np.repeat(np.linspace(-1, 1, 4), 6).astype(np.float32) * trained,
        "engine_logprobs": np.float32(-0.5) - trained * np.arange(24) / 8,
        "logprobs": np.float32(-0.6) - trained * np.arange(24) / 8,
        "mismatch": trained * np.float32(-0.1),
        "log_ratio": log_ratio,
        "entropy": trained * np.arange(24),
        "clipped": np.nan_to_num(np.sign(log_ratio) * (abs(log_ratio) > 0.2)),
    }
    pieces = {0: b"It", 1: b"\xe2\x82", 2: b"\xac <script>", 3: b"\xff\n", 4: HOSTILE.encode(errors="replace"), 5: b""}
    return StepTokens(step, rows, columns, pieces)
