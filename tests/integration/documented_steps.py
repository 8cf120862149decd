"""Carries out what the documentation's code blocks say, each step in a forked child of one process.

``python documented_steps.py steps.json`` reads a list of steps, made by ``documentation.py``, and prints their exit
codes as a JSON list. A step has a ``kind`` (``rlplug``, ``python``, ``pytest``, ``shell``), its ``arguments``, a
``folder`` to be in, a ``site`` folder that plugins were installed into, ``variables`` of the environment, and a file
for its ``output``.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import accelerate  # noqa: F401 - what every step would import: here it is paid for once
import forked_runs
import plotly.offline  # noqa: F401
import pytest
import transformers.models.llama.modeling_llama  # noqa: F401


def run_script(arguments: list[str]) -> int:
    sys.path.insert(0, os.getcwd())
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


KINDS: dict[str, Callable[[list[str]], int]] = {
    "rlplug": lambda arguments, main=forked_runs.main: main(arguments),
    "python": run_script,
    "pytest": lambda arguments: int(pytest.main(["-p", "no:cacheprovider", *arguments])),
    "shell": lambda arguments: subprocess.run(["bash", "-euc", *arguments], check=False).returncode,
}


def carry_out(step: dict) -> int:  # type: ignore[type-arg]
    """Run one step in a forked child and return its exit code."""

    def inside_child() -> int:
        os.chdir(step["folder"])
        os.environ.update(step["variables"])
        sys.path.insert(0, step["site"])
        try:
            return KINDS[step["kind"]](step["arguments"])
        except SystemExit as stopped:  # --help, --print_config, and scripts that end so
            return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)

    forked_runs.main = inside_child
    return forked_runs.run_in_child({"arguments": step["arguments"], "output": step["output"]})


if __name__ == "__main__":
    codes = [carry_out(step) for step in json.loads(Path(sys.argv[1]).read_text())]
    print("exit codes:", json.dumps(codes))
