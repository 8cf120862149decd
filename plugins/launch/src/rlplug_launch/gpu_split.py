"""Split of GPUs between engines and trainer of an asynchronous run, from measured rates."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from rlplug.distributed.durable_files import own_bytes
from rlplug.errors import ConfigError
from rlplug.observability.metrics_log import read_metrics

NUM_LEFT_OUT: Final = 2
"""Steps at a run's start whose times are not steady: compilation, and an asynchronous run that fills its engines."""
BY_HAND: Final = "Or give the rates: --engine-tokens-s and --trainer-tokens-s, of one GPU each."


@dataclass(frozen=True)
class GPURates:
    """Completion tokens per second of one GPU, as engine and as trainer.

    A split is as fast as its slower side, and each side as fast as its GPUs together: more GPUs of a side are taken to
    scale without loss. Weight syncs and the bound on staleness are left out, which both make a step longer.
    """

    engine: float
    trainer: float

    def speed(self, engines: int, num_gpus: int) -> float:
        """Return tokens per second with ``engines`` of ``num_gpus`` GPUs for engines."""
        return min(engines * self.engine, (num_gpus - engines) * self.trainer)

    def best(self, num_gpus: int) -> int:
        """Return the number of GPUs for engines with which a run is fastest; the smaller one where two are equal."""
        return max(range(1, num_gpus), key=lambda engines: (self.speed(engines, num_gpus), -engines))

    def describe(self, num_gpus: int) -> str:
        """Return lines for people: the best split, its neighbours, and which side waits in each."""
        best = self.best(num_gpus)
        in_turns = num_gpus / (1 / self.engine + 1 / self.trainer)
        lines = [
            f"split of {num_gpus} GPUs: {best} for engines, {num_gpus - best} for the trainer, from {self.engine:.4g} "
            f"and {self.trainer:.4g} completion tokens/s of one GPU; in turns on all GPUs {in_turns:.4g} tokens/s"
        ]
        for engines in range(max(1, best - 1), min(num_gpus, best + 2)):
            speed = self.speed(engines, num_gpus)
            waits = {
                "engines wait": 1 - speed / (engines * self.engine),
                "the trainer waits": 1 - speed / ((num_gpus - engines) * self.trainer),
            }
            side, share = max(waits.items(), key=lambda item: item[1])
            said = f"{side} {share:.0%} of the time" if share > 0.005 else "no side waits"
            lines.append(f"  {engines} : {num_gpus - engines}  {speed:.4g} tokens/s, {said}")
        return "\n".join(lines)


def rates_of_run(folder: Path) -> GPURates:
    """Return the rates that a run's folder shows, from the medians of its steps.

    The trainer's time is that of a step less its weight sync, rollout and validation. The engines' is that of sync and
    rollout where both take turns, which includes the wait for the longest completion; in an asynchronous run it is that
    of the step less the time in which the engine was idle.

    Raises:
        ConfigError: The folder has no steady steps, or does not say on how many GPUs the engines were.
    """
    rows, world_size = _rows(folder), _world_size(folder)
    engine_gpus = _engine_gpus(folder, world_size)
    engine, trainer = [], []
    for row in rows:
        tokens, step = row["completion/num_tokens"], row["time/step"] - row.get("time/validate", 0.0)
        rollout = row.get("time/sync", 0.0) + row["time/rollout"]
        generating = max(step - row["partial/engine_idle_s"], 1e-9) if "partial/engine_idle_s" in row else rollout
        engine.append(tokens / generating / engine_gpus)
        trainer.append(tokens / max(step - rollout, 1e-9) / world_size)
    return GPURates(statistics.median(engine), statistics.median(trainer))


def _rows(folder: Path) -> list[dict[str, float]]:
    path, wanted = folder / "metrics.jsonl", ("completion/num_tokens", "time/step", "time/rollout")
    if not path.is_file():
        raise ConfigError(f"--rates is {str(folder)!r}, which has no {path.name}: give the folder of a run. {BY_HAND}")
    steps = [row for row in read_metrics(path) if all(name in row for name in wanted)][NUM_LEFT_OUT:]
    if not steps:
        raise ConfigError(
            f"--rates is {str(folder)!r}, which has no steps after the first {NUM_LEFT_OUT}, which are not steady: "
            f"give a longer run. {BY_HAND}"
        )
    return steps


def _world_size(folder: Path) -> int:
    path = folder / "run.json"
    try:
        return int(json.loads(own_bytes(path))["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"--rates: {path} does not say how many GPUs trained. {BY_HAND}") from None


def _engine_gpus(folder: Path, world_size: int) -> int:
    """Return how many GPUs the engines of a run had: those of the trainer, or the servers' own."""
    path = folder / "config.yaml"
    try:
        config: Any = yaml.safe_load(own_bytes(path))
        rollout = config["model"].get("rollout") or {}
        name, options = rollout.get("class_path", ""), rollout.get("init_args") or {}
    except (OSError, ValueError, yaml.YAMLError, KeyError, AttributeError, TypeError):
        raise ConfigError(f"--rates: {path} cannot be read. {BY_HAND}") from None
    if options.get("gpus"):
        return len(options["gpus"])
    if options.get("urls") or "Server" in name or "Ray" in name:
        raise ConfigError(f"--rates: {path} does not say on how many GPUs the engines were. {BY_HAND}")
    return world_size
