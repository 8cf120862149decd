"""The check to run first where TensorRT-LLM is installed: ``python -m rlplug_rollout_trtllm.smoke``.

It says how the installed engine differs from what the plugin uses of it, and then runs the conformance kit on it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from rlplug.errors import ConfigError
from rlplug_rollout_trtllm.environment import VERSIONS, engine_environment, require_ray
from rlplug_rollout_trtllm.surface import differences

MODEL_VARIABLE: Final = "RLPLUG_SMOKE_MODEL"
"""Environment variable with the folder that :mod:`rlplug_rollout_trtllm.smoke_checks` takes."""

SEEDS: Final = (
    "By its sources, TensorRT-LLM 1.3 draws a request by its own seed only when it is sampled alone. So checks of "
    "seeds (test_equal_seeds_repeat, test_seed_decides_whatever_else_is_in_the_batch, "
    "test_streamed_tokens_follow_from_seeds) may fail for that reason; logprobs and distributions must not."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 when nothing differs and all pass, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m rlplug_rollout_trtllm.smoke",
        description="Check TensorRT-LLM as it is installed here: first the names that the plugin uses of it, then, on "
        "the first GPU, all that rlplug needs of an engine (its conformance kit): tokens, logprobs, distributions, "
        "weight syncs in bfloat16 and FP8, sleep, streaming, restart. Each of them that needs another model starts the "
        "engine anew.",
        epilog="Exit code 0: nothing differs, and all checks that apply passed. 1: something differs or failed, or "
        "could not be run.",
    )
    parser.add_argument("--surface-only", action="store_true", help="compare names and defaults, and start no engine")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="a model of the Llama family with its weights, for kernels that do not take the kit's own, which is tiny",
    )
    asked = parser.parse_args(arguments)
    try:
        is_as_known = _compare_surface()
    except ConfigError as problem:
        print(problem)
        return 1
    passed = asked.surface_only or _run_kit(asked.model or "")
    return 0 if is_as_known and passed else 1


def _compare_surface() -> bool:
    with engine_environment():
        version = VERSIONS.require_module("tensorrt_llm")
        found = differences()
    print(f"TensorRT-LLM {version}, Ray {require_ray().__version__}, torch {torch.__version__}")
    for line in found:
        print(f"  differs: {line}")
    print(f"{len(found)} differences from the names that rlplug-rollout-trtllm uses.")
    return not found


def _run_kit(model: str) -> bool:
    if not torch.cuda.is_available():
        print("No GPU: the conformance kit was not run.")
        return False
    if importlib.util.find_spec("pytest") is None:
        print("No pytest: the conformance kit was not run. pip install 'rlplug-rollout-trtllm[smoke]'")
        return False
    import pytest

    os.environ[MODEL_VARIABLE] = model
    checks = Path(__file__).with_name("smoke_checks.py")
    print(SEEDS, flush=True)
    options = ["--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(checks.parent)]
    return pytest.main([*options, str(checks)]) == 0


if __name__ == "__main__":
    sys.exit(main())
