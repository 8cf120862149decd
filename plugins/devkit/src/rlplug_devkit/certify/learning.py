"""The two-step learning run of a certification, and its parity: engine and trainer on the same tokens, at each step."""

from __future__ import annotations

import copy
import math
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlplug_devkit.check.results import Held
from rlplug_devkit.check.subjects import Subject
from rlplug_devkit.reference import Tolerances
from rlplug_devkit.tasks.tiny_run import CHARACTERS, TinyRun, train_two_steps
from rlplug_devkit.trainers.cases import TINY_MODELS

NUM_STEPS: Final = 2
LEARNING_RATE: Final = 1e-2
"""Large, so that logprobs of weights that no sync has reached differ by more than any tolerance."""
NUM_NEW_TOKENS: Final = 24
FIELDS: Final[Mapping[str, Any]] = {
    "vocab_size": len(CHARACTERS),
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,  # engines' kernels have no smaller one
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""What a family's model has here in place of its fields in ``TINY_MODELS``."""
METRICS: Final = ("mismatch/mean", "mismatch/max", "policy/grad_norm")


def family_config(family: str) -> PretrainedConfig:
    """Return the configuration of a family's tiny model."""
    config = copy.deepcopy(TINY_MODELS[family])
    config.update({**FIELDS, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]})
    return config


def try_learning(
    engine: Subject, trainer: Subject, family: str, tolerances: Tolerances, device: str, limit_s: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train two steps of a family's tiny model; return a result for each check, and what was measured at each step.

    Args:
        engine: What samples, with its arguments.
        trainer: What trains, with its arguments.
        family: Name in ``TINY_MODELS``.
        tolerances: Largest differences between the logprobs of the engine and of the trainer.
        device: ``cpu``, or the name of a GPU.
        limit_s: Longest time in seconds.
    """
    dtype = "float32" if device == "cpu" else "bfloat16"
    config = {
        "trainer": {"accelerator": "cpu" if device == "cpu" else "gpu", "devices": 1},
        "model": {
            "policy": {"path": "model", "init": "random", "dtype": dtype},
            "rollout": _named(engine),
            "trainer": _named(trainer),
            "sampling": {"max_new_tokens": NUM_NEW_TOKENS},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": LEARNING_RATE}},
            "num_steps": NUM_STEPS,
        },
    }
    part, began = f"run of {family}", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlplug-certify-") as folder:
        try:
            run = train_two_steps(Path(folder), config, limit_s, family_config(family))
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            return [_result(part, "two_steps_end", "failed", time.monotonic() - began, str(error)[-2000:])], {}
    seconds = time.monotonic() - began
    measured = {
        str(step): {name: metrics[name] for name in METRICS if name in metrics}
        for step, metrics in enumerate(run.metrics, start=1)
    }
    return judged(part, run, tolerances, seconds), measured


def judged(part: str, run: TinyRun, tolerances: Tolerances, seconds: float) -> list[dict[str, Any]]:
    """Return a result for each check of a run that ended.

    Args:
        part: Name of the results' part.
        run: What it left.
        tolerances: Largest mean and maximum of the differences at a step, in nats.
        seconds: What the run took; the first result has it.
    """
    norms = [metrics.get("policy/grad_norm", math.nan) for metrics in run.metrics]
    learns = len(norms) == NUM_STEPS and all(0 < norm < math.inf for norm in norms)
    results = [
        _result(part, "two_steps_end", "held", seconds),
        _result(part, "gradients_are_finite_and_not_zero", "held" if learns else "failed", 0.0, f"norms {norms}"),
    ]
    for step, metrics in enumerate(run.metrics, start=1):
        mean, largest = (metrics.get(f"mismatch/{name}", math.nan) for name in ("mean", "max"))
        agrees = mean <= tolerances.mean and largest <= tolerances.max
        says = f"mean {mean:.3g}, maximum {largest:.3g} nats; at most {tolerances.mean:g} and {tolerances.max:g}"
        name = f"engine_and_trainer_agree_in_step_{step}"
        results.append(_result(part, name, "held" if agrees else "failed", 0.0, says))
    return results


def _named(subject: Subject) -> dict[str, Any]:
    return {"class_path": subject.name, "init_args": dict(subject.init_args)}


def _result(part: str, check: str, held: Held, seconds: float, reason: str = "") -> dict[str, Any]:
    return {"part": part, "check": check, "held": held, "seconds": round(seconds, 3), "reason": reason}
