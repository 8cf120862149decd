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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0 when nothing differs and all pass, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m rlplug_rollout_trtllm.smoke",
        description="Check TensorRT-LLM as it is installed here: the names that the plugin uses of it, and then, on "
        "the first GPU, all that rlplug needs of an engine (its conformance kit).",
        epilog="Exit code 0: nothing differs, and all checks that apply passed. 1: otherwise, or some could not run.",
    )
    parser.add_argument("--surface-only", action="store_true", help="compare names and defaults, and start no engine")
    kernels = "a model of the Llama family with its weights, for kernels that do not take the kit's own, which is tiny"
    parser.add_argument("--model", metavar="FOLDER", default="", help=kernels)
    asked = parser.parse_args(arguments)
    try:
        with engine_environment():
            version, found, ray = VERSIONS.require_module("tensorrt_llm"), differences(), require_ray()
    except ConfigError as problem:
        print(problem)
        return 1
    print(f"TensorRT-LLM {version}, Ray {ray.__version__}, torch {torch.__version__}")
    for line in found:
        print(f"  differs: {line}")
    print(f"{len(found)} differences from the names that rlplug-rollout-trtllm uses.")
    passed = asked.surface_only or _run_kit(asked.model)
    return 0 if passed and not found else 1


def _run_kit(model: str) -> bool:
    kit = "rlplug-devkit (pip install 'rlplug-rollout-trtllm[smoke]')"
    if missing := "GPU" if not torch.cuda.is_available() else "" if importlib.util.find_spec("rlplug_devkit") else kit:
        print(f"No {missing}: the conformance kit was not run.")
        return False
    import pytest

    os.environ[MODEL_VARIABLE] = model
    checks = Path(__file__).with_name("smoke_checks.py")
    print("Checks of seeds may fail (docs/tensorrt-llm.md names them and the reason); others must not.", flush=True)
    options = ["--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(checks.parent)]
    return pytest.main([*options, str(checks)]) == 0


if __name__ == "__main__":
    sys.exit(main())
