"""rlplug's side of the step benchmark: ``rlplug fit`` with vLLM in the trainer's process. ``step.py`` starts it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback
from step_work import (
    GROUP,
    NAME,
    SPANS,
    MemoryWatch,
    Workload,
    chosen_workload,
    end_trajectories_at,
    lengths_of_this_rank,
    prepare,
    say,
    send_weights_through_the_host,
    write_prompts,
)

from rlplug.cli.main import main
from rlplug.interfaces import RunObserver, StepRecord

LEARNED = ("loss", "policy/loss", "policy/grad_norm", "reward/mean", "mismatch/mean", "mismatch/kl")
"""Metrics by which two runs are compared."""


class RankSpans:
    """Writes a line a step to a file of this rank: when each phase began, and how long it took, in seconds.

    ``engine`` is the engine's own work in ``rollout``, without the wait for the ranks that come last.

    Args:
        folder: It is made where it is not there.
        rank: Number of this rank.
        module: The run.
    """

    def __init__(self, folder: Path, rank: int, module: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"rank-{rank}.jsonl"
        self._spans: list[tuple[str, float, float]] = []
        module.timer.on_exit = self._note
        engine = module.config.engine
        generate = engine.generate

        def timed(*arguments: Any) -> Any:
            began = time.time()
            completions = generate(*arguments)
            self._note("engine", time.time() - began)
            return completions

        engine.generate = timed

    def _note(self, name: str, seconds: float) -> None:
        self._spans.append((name, round(time.time() - seconds, 3), round(seconds, 4)))

    def end_step(self, step: int) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, "spans": self._spans}) + "\n")
        self._spans = []


class StepClock(Callback, RunObserver):
    """Prints a line for each step: the time since the last one ended, with all that lies between.

    After the last it ends the process, before a checkpoint is written and after a profile is. With a folder in
    ``STEP_SPANS`` each rank writes there when its phases and its engine's own work began, and how long they took.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.watch = MemoryWatch()
        self.watch.start()
        module.timer.on_enter = lambda name: setattr(self.watch, "phase", name)
        if SPANS in os.environ:
            self.spans = RankSpans(Path(os.environ[SPANS]), trainer.global_rank, module)
        self.ended = time.perf_counter()

    def step_ended(self, record: StepRecord) -> None:
        self.metrics = record.metrics

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if SPANS in os.environ:
            self.spans.end_step(module.rollout_step)
        if not trainer.is_global_zero:
            return
        now, metrics = time.perf_counter(), self.metrics
        phases = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
        phases["generate"] = metrics["rollout/num_tokens"] / max(metrics["rollout/tokens_per_s"], 1e-9)
        phases["sync"] = metrics.get("sync/seconds", 0.0)
        for name in ("wake", "sleep"):
            phases[name] = metrics.get(f"rollout/{name}_seconds", 0.0)
        phases["offload"] = metrics.get("offload/seconds", 0.0)
        say(
            side="rlplug",
            step=module.rollout_step,
            seconds=now - self.ended,
            completion_tokens=metrics["completion/num_tokens"],
            phases={name: round(value, 4) for name, value in phases.items()},
            peaks=self.watch.drain(),
            memory={n.removeprefix("memory/"): round(v, 2) for n, v in metrics.items() if n.startswith("memory/")},
            learned={name: metrics[name] for name in LEARNED if name in metrics},
            mismatch=metrics.get("mismatch/mean", 0.0),
            partial={n.removeprefix("partial/"): round(v, 4) for n, v in metrics.items() if n.startswith("partial/")},
        )
        self.ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if module.rollout_step == self.steps:
            os._exit(0)


def configuration(workload: Workload, model: Path, prompts: Path, steps: int, out: Path) -> dict[str, Any]:
    """Return the run, as YAML would say it."""
    on_gpu = torch.cuda.is_available()
    num_devices = torch.cuda.device_count() if on_gpu else 1
    engine = {
        "gpu_memory_utilization": workload.kv_cache_share,
        "max_model_len": workload.prompt + workload.longest,
        "max_num_seqs": workload.num_completions // num_devices,
    }
    return {
        "trainer": {
            "accelerator": "gpu" if on_gpu else "cpu",
            "devices": num_devices,
            "callbacks": [{"class_path": "step_rlplug.StepClock", "init_args": {"steps": steps}}],
            "strategy": {
                "class_path": "rlplug.distributed.strategy.RLFSDP2Strategy",
                "init_args": {"reshard_after_forward": False, "reshard_after_backward": False},
            },
        },
        "model": {
            "policy": {"path": str(model), "init": "random"},
            "algorithm": {"class_path": "GRPO"},
            "rewards": [{"class_path": "FunctionReward", "init_args": {"function": "step_work.random_reward"}}],
            "rollout": {"class_path": "VLLMRollout", "init_args": engine},
            "batch": {
                "prompts_per_step": workload.num_completions // GROUP,
                "group_size": GROUP,
                "max_tokens_per_gpu": workload.max_tokens,
            },
            "sampling": {"max_new_tokens": workload.longest},
            "optimizations": [{"class_path": "CompileBlocks"}, {"class_path": "FusedLogprobs"}],
            "num_steps": steps + 1,
            "validation": {"every_n_steps": None, "at_start": False},
            **({"lora": {"rank": rank, "alpha": 2 * rank}} if (rank := workload.lora_rank) else {}),
        },
        "data": {"train": {"class_path": "FileSource", "init_args": {"path": str(prompts)}}},
        "run": {"dir": str(out), "report": False, "export_policy": False},
        "checkpoint": {"every_n_steps": 1000},
    }


def prepared(name: str, folder: Path, steps: int) -> list[str]:
    """Write the run's configuration and return the command line, without the program."""
    os.environ[NAME] = name
    workload, file = chosen_workload(), folder / f"rlplug-{name}.yaml"
    model = prepare(workload, folder, with_weights=False)
    prompts = write_prompts(workload, folder)
    file.write_text(yaml.safe_dump(configuration(workload, model, prompts, steps, folder / "runs")))
    return ["fit", "-c", str(file)]


if __name__ == "__main__":
    if sys.argv[1] == "fit":  # one of the processes that Lightning starts for other GPUs
        arguments = sys.argv[1:]
    else:
        name, work, num_steps, *extra = sys.argv[1:]
        arguments = [*prepared(name, Path(work), int(num_steps)), *extra]
    end_trajectories_at(lengths_of_this_rank(chosen_workload()))
    if os.environ.get("STEP_THROUGH_HOST") == "1":
        send_weights_through_the_host()
    sys.exit(main(arguments))
