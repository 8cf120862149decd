"""One rank of ``host_cost.py``: takes a step's completions from the engine to the first micro-batch.

It runs in a checkout, whose ``rlplug`` it measures. An environment variable has what is asked of it, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from host_cost import END, GROUP_SIZE, PROMPT_TOKENS, WORKER, lengths_of
from rlplug_algos.grpo import GRPO
from transformers import AutoTokenizer

import rlplug
from rlplug.distributed.mesh import rank_share
from rlplug.interfaces import PolicySpec, RunInfo
from rlplug.rollout.agent_loop import AgentLoop
from rlplug.rollout.config import TurnOptions
from rlplug.rollout.ranks import EngineRanks
from rlplug.rollout.source import RolloutSource
from rlplug.rollout.trajectory import new_trajectories, to_samples
from rlplug.rollout.turns.trajectory_turns import TurnRules
from rlplug.training.batch_plan import BatchPlan, BatchSizes
from rlplug.types import Completion, Prompt, SamplingParams


class Phases:
    """Wall seconds, CPU seconds and growth in bytes of each phase."""

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        held, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
        yield
        taken = [time.perf_counter() - wall, time.process_time() - cpu, float(memory("VmHWM") - held)]
        before = self.rows.get(name, [0.0, 0.0, 0.0])
        self.rows[name] = [before[0] + taken[0], before[1] + taken[1], max(before[2], taken[2])]


def memory(name: str) -> int:
    """Return a field of this process's memory in bytes: ``VmRSS``, or ``VmHWM`` for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def less(whole: list[float], part: list[float]) -> list[float]:
    """Return a phase's seconds without those of another inside it; memory was measured since that one's end."""
    return [whole[0] - part[0], whole[1] - part[1], whole[2]]


class TimedTokenizer:
    """Decodes, and times that."""

    def __init__(self, tokenizer: Any, phases: Phases) -> None:
        self._decode, self._phases = tokenizer.batch_decode, phases

    def batch_decode(self, *arguments: Any, **options: Any) -> Any:
        with self._phases.phase("decode"):
            return self._decode(*arguments, **options)


class Engine:
    """Generates nothing: answers with random tokens and logprobs of the given lengths."""

    capabilities = SimpleNamespace(logprobs=True, streaming=False)
    is_stopping = staticmethod(lambda: False)

    def __init__(self, lengths: Sequence[int], phases: Phases) -> None:
        self._lengths, self._phases = lengths, phases

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[Any]:
        with self._phases.phase("engine"):
            answers = self.draw(requests)
        with self._phases.phase("completions"):
            return [Completion(name, tuple(t), tuple(p), "stop", 1) for name, t, p in answers]

    def draw(self, requests: Sequence[Any]) -> list[Any]:
        answers = []
        for request in requests:
            length = self._lengths[int(request.request_id.split("/")[1]) * GROUP_SIZE + int(request.request_id[-2:])]
            generator = np.random.default_rng(length)
            tokens = generator.integers(3, 49152, length).tolist()
            tokens[-1] = END
            answers.append((request.request_id, tokens, (-generator.exponential(0.5, length)).tolist()))
        return answers


class Driver:
    """The part of ``EngineDriver`` that a rollout without faults calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def ready_engine(self, version: int) -> Iterator[Engine]:
        yield self._engine

    def with_restarts(self, attempt: Callable[[], None], num_missing: Callable[[], int]) -> None:
        attempt()

    def finish(self) -> None: ...


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """Take one step's completions from the engine to the first micro-batch, and return what each phase took."""
    assert Path(rlplug.__file__).is_relative_to(Path.cwd()), rlplug.__file__
    torch.set_num_threads(1)
    rank, world_size, num_groups = work["rank"], work["ranks"], work["groups"]
    if world_size > 1:
        address = f"tcp://127.0.0.1:{work['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    tokenizer = AutoTokenizer.from_pretrained(work["tokenizer"])
    phases = Phases()
    strategy: Any = SimpleNamespace(
        world_size=world_size, data_rank=rank, sequence_rank=0, sequence_size=1, sequence_group=None
    )
    strategy.root_device = torch.device("cpu")
    num_completions = num_groups * GROUP_SIZE
    lengths = lengths_of(num_completions, work["mean"])
    trajectories = start(num_groups, rank, world_size)
    generate(trajectories, lengths, strategy, phases)
    samples = score(trajectories, tokenizer, phases)
    del trajectories
    if world_size > 1:
        dist.barrier()
    algorithm = GRPO()
    algorithm.setup(RunInfo(num_completions, GROUP_SIZE, max(lengths)))
    longest = PROMPT_TOKENS + max(lengths)
    plan = BatchPlan(BatchSizes(num_groups, GROUP_SIZE), world_size, longest=longest, quadratic_cost=3.5e-5)
    loaded = first_of_own_rows(samples, algorithm, plan, strategy, phases)
    check_sum = [int(loaded.packed.input_ids.sum()), float(loaded.batch.rollout_logprobs.sum())]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"phases": phases.rows, "tokens": sum(lengths), "loaded": check_sum, "peak": peak}


def start(num_groups: int, rank: int, world_size: int) -> list[Any]:
    """Return the trajectories of a rank's share of the groups, with random prompts."""
    generator = random.Random(1)
    prompts = [
        Prompt(str(index), tuple(generator.choices(range(3, 49152), k=PROMPT_TOKENS)), "")
        for index in range(num_groups)
    ]
    mine = rank_share(range(num_groups), rank, world_size)
    trajectories = new_trajectories([prompts[group] for group in mine], list(mine), GROUP_SIZE, "k")
    for number, trajectory in enumerate(trajectories):
        trajectory.key = f"k/{trajectory.group}/{number % GROUP_SIZE:02}"
    return trajectories


def generate(trajectories: list[Any], lengths: Sequence[int], strategy: Any, phases: Phases) -> None:
    """Let the agent loop check the engine's answers and append them to their trajectories."""
    placement: Any = SimpleNamespace(
        rank=strategy.data_rank, world_size=strategy.world_size, device=strategy.root_device
    )
    ranks = EngineRanks(placement, 1, communicates=False)
    spec = PolicySpec("drawn", torch.float32, (END,), END, PROMPT_TOKENS + max(lengths), vocab_size=49152)
    sampling = SamplingParams(max_new_tokens=max(lengths))
    loop = AgentLoop(trajectories, sampling, TurnRules(TurnOptions()), spec, 1, ranks)
    driver: Any = Driver(Engine(lengths, phases))
    with phases.phase("check"):
        loop.run(driver)
    phases.rows["check"] = less(less(phases.rows["check"], phases.rows["completions"]), phases.rows.pop("engine"))


def score(trajectories: list[Any], tokenizer: Any, phases: Phases) -> list[Any]:
    """Return the trajectories' samples, with random rewards."""
    timed: Any = TimedTokenizer(tokenizer, phases)
    with phases.phase("samples"):
        samples = to_samples(trajectories, timed, has_environment=False)
    phases.rows["samples"] = less(phases.rows["samples"], phases.rows["decode"])
    generator, scored = random.Random(2), []
    for sample in samples:
        reward = float(generator.random() < 0.5)
        scored.append(replace(sample, rewards={"r": reward}, reward=reward))
    return scored


def first_of_own_rows(samples: list[Any], algorithm: Any, plan: Any, strategy: Any, phases: Phases) -> Any:
    """Return the first micro-batch, where tokens stay on the rank that generated them."""
    from torch import distributed as dist

    from rlplug.distributed.exchange import exchange_arrays, gather_arrays
    from rlplug.training.advantages import compute_advantages
    from rlplug.training.passes import MicroBatchRunner
    from rlplug.training.samples.metrics import rollout_metrics, sample_table
    from rlplug.training.samples.selection import GroupSelection
    from rlplug.training.step_rows import StepRows
    from rlplug.types import Rollout, StepBatch, StepStatistics

    size, device = strategy.world_size, strategy.root_device
    strategy.global_rank, strategy.data_size, strategy.data_ranks = strategy.data_rank, size, list(range(size))
    strategy.gather_arrays = lambda array: gather_arrays(array, size, device, dist.group.WORLD)
    strategy.exchange_arrays = lambda parts, lengths: exchange_arrays(parts, lengths, device)
    with phases.phase("select"):
        groups = plan.num_completions // GROUP_SIZE
        rollout = GroupSelection(algorithm, groups, RolloutSource(), strategy.gather_arrays).add(Rollout(), samples)
        rollout_metrics(sample_table(rollout, ["r"], strategy.gather_arrays), ["r"])
    del samples
    with phases.phase("batch"):
        batch = StepBatch.from_samples(rollout.samples, StepStatistics(size))
    with phases.phase("advantages"):
        batch, _ = compute_advantages(algorithm, batch, list)
    runner = MicroBatchRunner(plan, strategy)
    with phases.phase("plan"):
        rows = StepRows(batch, strategy)
        indices = plan.mini_batches(rows.num_sequences, 0, 0)[0]
        plan.passes(indices, rows.lengths)
    with phases.phase("exchange"):
        fetched = runner.fetch(rows, indices, "update")
    with phases.phase("load"):
        return runner.load(fetched, fetched.micro_batches[0])


if __name__ == "__main__":
    asked = json.loads(os.environ[WORKER])
    Path(asked["output"]).write_text(json.dumps(measure(asked)))
