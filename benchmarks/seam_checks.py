"""Measures what the checks of plugins' answers, and the counting of hooks, take of a step.

    python benchmarks/seam_checks.py steps -c configs/quickstart.yaml --steps 10
    python benchmarks/seam_checks.py sizes --tokens 0.1 1 8

``steps`` trains, in this process and with a plugin that implements every hook of a step, and prints for each check
its calls and CPU microseconds a step, and its share of the step's CPU seconds: on a busy machine, wall time is that of
other work too. Of each call, what a call of an empty function costs under the same clock is taken off. ``copies of
weights`` are those of a policy that one rank holds in the engine's dtype: they come in place of a check that the engine
leaves them as they are.

``sizes`` measures the checks that look at tokens on drawn completions, in groups and lengths as those of
``host_cost.py``, without a model: milliseconds, to be held against the seconds of a step of that size.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

WARM_UP = 2
"""Steps that are not counted: what is imported and compiled at the first use."""
CHECKS = {
    "completions": ("rlplug.rollout.completion_checks", "are_sound"),
    "list": ("rlplug.rollout.agent_loop", "check_list"),
    "report": ("rlplug.rollout.engine_driver", "check_report"),
    "stats": ("rlplug.rollout.engine_driver", "check_stats"),
    "selection": ("rlplug.training.samples.selection", "check_selection"),
    "advantages": ("rlplug.training.advantages", "accept_advantages"),
    "loss": ("rlplug.builtin_plugin", "check_loss"),
    "micro-batches": ("rlplug.training.update", "check_same_names"),
    "process state, read": ("rlplug.interfaces.checks.process_state", "ProcessState.now"),
    "process state, compare": ("rlplug.interfaces.checks.process_state", "ProcessState.require_unchanged"),
    "metrics": ("rlplug.interfaces.checks.metrics", "MetricsOfStep.add"),
    "hooks: what they return": ("rlplug.observability.hook_costs", "HookChecks.accept"),
    "hooks: counting": ("rlplug.observability.hook_costs", "HookCosts._add"),
    "copies of weights": ("rlplug.weight_sync.buckets", "_apart"),
    "mismatch gate": ("rlplug.training.mismatch_gate", "MismatchGate._judge"),
}
"""Module, and function or method, of each check. ``process state, compare`` reads the state a second time, which counts
there alone."""


PLUGIN = """
from rlplug.plugin_manager import hookimpl

RLPLUG_API_VERSION = ">=3,<4"

@hookimpl
def rlplug_after_rollout(rollout):
    return {"measured/rollout": 1.0}

@hookimpl
def rlplug_after_update(metrics):
    return {"measured/update": 1.0}

@hookimpl(wrapper=True)
def rlplug_sync_weights():
    return (yield)

@hookimpl(wrapper=True)
def rlplug_prepare_batch():
    batch = yield
    return batch.replace(advantages=batch.advantages)

@hookimpl(wrapper=True)
def rlplug_compute_loss():
    return (yield)
"""
"""A plugin that implements every hook of a step."""


class Clock:
    """CPU seconds and calls of the checks, and of whole steps."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.steps: list[float] = []
        """CPU seconds of each step."""
        self._inside = ""

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, counted under ``name`` unless another check calls it."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, began = name, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began
                self.calls[name] = self.calls.get(name, 0) + 1
                self._inside = ""

        return call

    def install(self) -> None:
        """Time all checks from now on."""
        for name, (module, path) in CHECKS.items():
            holder: Any = import_module(module)
            *owners, last = path.split(".")
            for owner in owners:
                holder = getattr(holder, owner)
            found = vars(holder)[last]
            timed = self.timed(name, found.__func__ if isinstance(found, staticmethod) else found)
            setattr(holder, last, staticmethod(timed) if isinstance(found, staticmethod) else timed)
        from rlplug.module import RLModule

        take_step = RLModule.training_step

        def training_step(*args: Any) -> None:
            began = time.process_time()
            take_step(*args)
            self.steps.append(time.process_time() - began)
            if len(self.steps) == WARM_UP:
                self.seconds, self.calls = {}, {}

        RLModule.training_step = training_step  # type: ignore[method-assign]

    def own_cost(self) -> float:
        """Return the seconds that an empty function seems to take under this clock."""
        clock = Clock()
        empty = clock.timed("empty", lambda: None)
        for _ in range(20_000):
            empty()
        return clock.seconds["empty"] / clock.calls["empty"]


def steps(arguments: argparse.Namespace, rest: Sequence[str]) -> None:
    """Train, and print each check's share of the steps after the first ones."""
    from rlplug.cli.main import main as rlplug

    clock = Clock()
    clock.install()
    with tempfile.TemporaryDirectory() as folder:
        install_plugin(Path(folder) / "installed")
        options = ["--model.num_steps", str(arguments.steps), "--run.dir", f"{folder}/run", "--run.report", "false"]
        assert rlplug(["fit", "-c", arguments.config, *options, *rest]) == 0
    num_steps = len(clock.steps) - WARM_UP
    seconds = statistics.mean(clock.steps[WARM_UP:])
    own = clock.own_cost()
    print(f"\n{arguments.config}: {num_steps} steps of {seconds:.3f} CPU s; the clock costs {own * 1e6:.2f} us a call")
    print("\n| check | calls a step | us a step | share of a step |\n|---|---|---|---|")
    total = 0.0
    for name in CHECKS:
        calls = clock.calls.get(name, 0) / num_steps
        took = max(0.0, clock.seconds.get(name, 0.0) / num_steps - calls * own)
        total += took
        print(f"| {name} | {calls:.1f} | {took * 1e6:.0f} | {took / seconds:.4%} |")
    print(f"| all | | {total * 1e6:.0f} | {total / seconds:.4%} |")


def install_plugin(folder: Path) -> None:
    """Install the plugin for this process."""
    metadata = folder / "measured-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "measured_plugin.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: measured\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rlplug.plugins]\nmeasured = measured_plugin\n")
    sys.path.insert(0, str(folder))


def sizes(arguments: argparse.Namespace) -> None:
    """Print the milliseconds of the checks that look at tokens, of one rank's step."""
    from host_cost import GROUP_SIZE, SIZES, lengths_of

    from rlplug.interfaces import Advantages, PolicySpec
    from rlplug.interfaces.checks.algorithms import accept_advantages, check_rows
    from rlplug.interfaces.checks.calls import PluginCall
    from rlplug.interfaces.checks.engines import are_sound
    from rlplug.types import Completion, StepBatch

    print("| million tokens | completions, ms | advantages [B, T], ms | an edited batch, ms |\n|---|---|---|---|")
    for million in arguments.tokens:
        num_groups, mean = SIZES[million]
        lengths, generator = lengths_of(num_groups * GROUP_SIZE, mean), np.random.default_rng(0)
        policy = PolicySpec("drawn", torch.bfloat16, (2,), 0, 1 << 20, vocab_size=49152)
        completions = []
        for index, length in enumerate(lengths):
            tokens = generator.integers(3, 49152, length, dtype=np.int32)
            tokens[-1] = 2
            logprobs = -generator.exponential(0.5, length).astype(np.float32)
            completions.append(Completion(str(index), tokens, logprobs, "stop", 1))
        tokens = np.concatenate([each.token_ids for each in completions])
        batch = StepBatch(
            np.array(lengths),
            {"group_index": np.arange(len(lengths)) // GROUP_SIZE, "rewards": np.zeros(len(lengths), np.float32)},
            {"input_ids": tokens, "response_mask": np.ones(len(tokens), np.bool_)},
        )
        batch = batch.replace(advantages=torch.zeros(len(tokens)))
        result, edited = (
            Advantages(of_tokens=torch.zeros(len(tokens))),
            batch.with_tokens(advantages=torch.ones(len(tokens))),
        )
        call = PluginCall("benchmark")
        work: list[Callable[[], Any]] = [
            lambda: are_sound(completions, lengths, policy, 1, True),  # noqa: B023
            lambda: accept_advantages(call, result, batch),  # noqa: B023
            lambda: check_rows(call, edited, batch),  # noqa: B023
        ]
        assert are_sound(completions, lengths, policy, 1, True)
        print(f"| {million:g} | " + " | ".join(f"{milliseconds(each):.2f}" for each in work) + " |")


def milliseconds(function: Callable[[], Any], repeats: int = 7) -> float:
    """Return the CPU time of a call, the median of some: on a busy machine, wall time is that of other work."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return statistics.median(found) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_steps = commands.add_parser("steps", help="of a training")
    of_steps.add_argument("-c", "--config", required=True)
    of_steps.add_argument("--steps", type=int, default=10)
    of_sizes = commands.add_parser("sizes", help="on drawn completions")
    of_sizes.add_argument("--tokens", type=float, nargs="+", default=[0.1, 1.0, 8.0])
    arguments, rest = parser.parse_known_args()
    print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}))
    if arguments.command == "steps":
        steps(arguments, rest)
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        sizes(arguments)


if __name__ == "__main__":
    main()
