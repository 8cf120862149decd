"""Measures what a step costs the host between the engine's answer and the first micro-batch on the device.

    python benchmarks/host_cost.py --checkout ../before . --tokens 0.1 1 8 --ranks 1 2 4

Each table is of ``--ranks`` processes, joined by gloo, that take a step's completions through the product's own code.
An engine that generates nothing answers at once with tuples of random tokens and logprobs, Python objects as vLLM and
a server's JSON give them. With several checkouts, each size runs in all of them, one after another, so that what is
compared ran on the same machine at about the same time. Each runs with the interpreter of its own ``.venv``.

The phases:

- ``completions``: make the engine's answers into ``Completion``;
- ``check``: the agent loop checks the answers and appends them to their trajectories;
- ``decode``: the tokenizer makes the text that rewards and logs read;
- ``samples``: the rest of ``to_samples``;
- ``gather``: exchange the scored samples between ranks, as versions of the hook API below 2 do;
- ``select``: sort, let GRPO select groups, and compute the rollout's metrics;
- ``batch``: make the samples arrays or tensors;
- ``advantages``: GRPO's;
- ``plan``: cut the rows into mini- and micro-batches;
- ``exchange``: bring the rows to the ranks that compute them, from version 2 on;
- ``load``: select, pack and move the first micro-batch.

A row says: wall and CPU seconds of the rank that needed most, and by how many GiB a process grew at most above what it
held before the phase. ``all`` has the peak of a whole process, with the engine's answers and 0.4 GiB of imports.
Rewards are drawn, because what a reward costs is its own matter. Where processes outnumber cores, read the CPU seconds.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GROUP_SIZE = 16
SIZES = {0.1: (8, 781), 1.0: (32, 1953), 8.0: (64, 7812), 40.0: (512, 4882)}
"""Million tokens: groups, and tokens of the mean completion. The last is DAPO's published step."""
PROMPT_TOKENS = 100
END = 2
"""End token of every completion; the others are drawn."""
GIB = 1 << 30
WORKER = "RLPLUG_HOST_COST"
"""Environment variable with what a rank measures, as JSON."""


# ---- one rank -----------------------------------------------------------------------------------------------------


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


def lengths_of(num_completions: int, mean: int) -> list[int]:
    """Return lengths in tokens with a long tail and the given mean: log-normal, cut at four times its median."""
    generator = random.Random(0)
    drawn = [min(generator.lognormvariate(0.0, 0.7), 4.0) for _ in range(num_completions)]
    return [max(1, round(each * mean * num_completions / sum(drawn))) for each in drawn]


def measure(work: dict[str, Any]) -> dict[str, Any]:
    """Take one step's completions from the engine to the first micro-batch, and return what each phase took."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from rlplug_algos.grpo import GRPO
    from transformers import AutoTokenizer

    import rlplug
    from rlplug.distributed.mesh import rank_share
    from rlplug.interfaces import PolicySpec, RunInfo
    from rlplug.rollout.agent_loop import AgentLoop
    from rlplug.rollout.config import TurnOptions
    from rlplug.rollout.engines.ranks import EngineRanks
    from rlplug.rollout.trajectory import new_trajectories, to_samples
    from rlplug.training.batch_plan import BatchPlan, BatchSizes
    from rlplug.types import Completion, Prompt, SamplingParams

    assert Path(rlplug.__file__).is_relative_to(Path.cwd()), rlplug.__file__
    torch.set_num_threads(1)
    rank, world_size, num_groups, mean = work["rank"], work["ranks"], work["groups"], work["mean"]
    if world_size > 1:
        address = f"tcp://127.0.0.1:{work['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    tokenizer = AutoTokenizer.from_pretrained(work["tokenizer"])
    phases = Phases()
    strategy: Any = SimpleNamespace(
        world_size=world_size, data_rank=rank, sequence_rank=0, sequence_size=1, sequence_group=None
    )
    strategy.root_device = torch.device("cpu")
    decode, num_completions = tokenizer.batch_decode, num_groups * GROUP_SIZE

    class TimedTokenizer:
        def batch_decode(self, *arguments: Any, **options: Any) -> Any:
            with phases.phase("decode"):
                return decode(*arguments, **options)

    class Engine:
        capabilities = SimpleNamespace(logprobs=True, streaming=False)
        is_stopping = staticmethod(lambda: False)

        def generate(self, requests: Sequence[Any], sampling: Any) -> list[Any]:
            with phases.phase("engine"):
                answers = self.draw(requests)
            with phases.phase("completions"):
                return [Completion(name, tuple(t), tuple(p), "stop", 1) for name, t, p in answers]

        def draw(self, requests: Sequence[Any]) -> list[Any]:
            answers = []
            for request in requests:
                length = lengths[int(request.request_id.split("/")[1]) * GROUP_SIZE + int(request.request_id[-2:])]
                generator = np.random.default_rng(length)
                tokens = generator.integers(3, 49152, length).tolist()
                tokens[-1] = END
                answers.append((request.request_id, tokens, (-generator.exponential(0.5, length)).tolist()))
            return answers

    class Driver:
        """The part of ``EngineDriver`` that a rollout without faults calls."""

        @contextmanager
        def ready_engine(self, version: int) -> Iterator[Engine]:
            yield Engine()

        def end_if_stopping(self, fault: Any) -> None: ...
        def finish(self) -> None: ...
        def failed_on_any_rank(self, fault: Any) -> bool:
            if fault is not None:
                raise fault
            return False

    lengths, generator = lengths_of(num_completions, mean), random.Random(1)
    prompts = [
        Prompt(str(index), tuple(generator.choices(range(3, 49152), k=PROMPT_TOKENS)), "")
        for index in range(num_groups)
    ]
    longest = PROMPT_TOKENS + max(lengths)
    sampling = SamplingParams(max_new_tokens=max(lengths))
    mine = rank_share(range(num_groups), rank, world_size)
    trajectories = new_trajectories([prompts[group] for group in mine], list(mine), GROUP_SIZE, "k")
    for number, trajectory in enumerate(trajectories):
        trajectory.key = f"k/{trajectory.group}/{number % GROUP_SIZE:02}"
    placement: Any = SimpleNamespace(rank=rank, world_size=world_size, device=strategy.root_device)
    ranks = EngineRanks(placement, 1, communicates=False)
    if "policy" in inspect.signature(AgentLoop).parameters:
        policy = PolicySpec("drawn", torch.float32, (END,), END, longest, vocab_size=49152)
        checked_against: tuple[Any, ...] = (policy, 1)
    else:
        checked_against = (49152,)
    loop = AgentLoop(trajectories, sampling, TurnOptions(), None, None, None, ranks, *checked_against)
    driver: Any = Driver()
    with phases.phase("check"):
        loop.run(driver, 1)
    phases.rows["check"] = less(less(phases.rows["check"], phases.rows["completions"]), phases.rows.pop("engine"))
    timed: Any = TimedTokenizer()
    with phases.phase("samples"):
        samples = to_samples(trajectories, timed, has_environment=False)
    phases.rows["samples"] = less(phases.rows["samples"], phases.rows["decode"])
    del trajectories, loop
    samples = [replace(sample, rewards={"r": reward}, reward=reward) for sample in samples if (reward := draw()) >= 0]
    if world_size > 1:
        dist.barrier()
    algorithm = GRPO()
    algorithm.setup(RunInfo(num_completions, GROUP_SIZE, max(lengths)))
    plan = BatchPlan(BatchSizes(num_groups, GROUP_SIZE), world_size, longest=longest, quadratic_cost=3.5e-5)
    to_first_micro_batch = first_of_own_rows if hasattr(rlplug.types, "StepBatch") else first_of_gathered
    loaded = to_first_micro_batch(samples, algorithm, plan, strategy, phases)
    check_sum = [int(loaded.packed.input_ids.sum()), float(loaded.batch.rollout_logprobs.sum())]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"phases": phases.rows, "tokens": sum(lengths), "loaded": check_sum, "peak": peak}


def first_of_own_rows(samples: list[Any], algorithm: Any, plan: Any, strategy: Any, phases: Phases) -> Any:
    """Return the first micro-batch, where tokens stay on the rank that generated them."""
    from rlplug.distributed.exchange import exchange_arrays, gather_arrays
    from rlplug.training.advantages import compute_advantages
    from rlplug.training.forward_backward import MicroBatchRunner
    from rlplug.training.samples.metrics import rollout_metrics
    from rlplug.training.samples.selection import GroupSelection
    from rlplug.training.samples.table import sample_table
    from rlplug.training.step_rows import StepRows
    from rlplug.types import Rollout, StepBatch, StepStatistics

    size, device = strategy.world_size, strategy.root_device
    strategy.global_rank, strategy.data_size, strategy.data_ranks = strategy.data_rank, size, list(range(size))
    strategy.gather_arrays = lambda array: gather_arrays(array, size, device)
    strategy.exchange_arrays = lambda parts, lengths: exchange_arrays(parts, lengths, device)
    with phases.phase("select"):
        groups = plan.num_completions // GROUP_SIZE
        rollout = GroupSelection(algorithm, groups, None, strategy.gather_arrays).add(Rollout(), samples)
        rollout_metrics(sample_table(rollout, ["r"], strategy.gather_arrays), ["r"])
    del samples
    with phases.phase("batch"):
        batch = StepBatch.from_samples(rollout.samples, 0, StepStatistics(size))
    with phases.phase("advantages"):
        batch, _ = compute_advantages(algorithm, batch, list)
    runner = MicroBatchRunner(plan, strategy)
    with phases.phase("plan"):
        rows = StepRows(batch, strategy)
        indices = plan.mini_batches(rows.num_sequences, 0, 0)[0]
        plan.micro_batches(indices, rows.lengths, strategy.data_rank)
    with phases.phase("exchange"):
        fetched = runner.fetch(rows, indices, "update")
    with phases.phase("load"):
        return runner._load(fetched, fetched.micro_batches[0])


def first_of_gathered(samples: list[Any], algorithm: Any, plan: Any, strategy: Any, phases: Phases) -> Any:
    """Return the first micro-batch, where every rank holds the whole step: checkouts before version 2 of the API."""
    from rlplug.training.group_selection import GroupSelection
    from rlplug.training.rollout_metrics import rollout_metrics

    from rlplug.distributed.strategy import RLFSDP2Strategy
    from rlplug.training.forward_backward import MicroBatchRunner
    from rlplug.types import Batch, Rollout

    selection: Any = GroupSelection
    with phases.phase("gather"):
        samples = RLFSDP2Strategy.gather(strategy, samples)
    with phases.phase("select"):
        samples = sorted(samples, key=lambda sample: sample.group)
        rollout = selection(algorithm, plan.num_completions // GROUP_SIZE, None).add(Rollout(), samples)
        rollout_metrics(rollout)  # type: ignore[call-arg, arg-type]
    del samples
    with phases.phase("batch"):
        batch: Any = Batch.from_samples(rollout.samples, 0)  # type: ignore[attr-defined]
    with phases.phase("advantages"):
        batch = batch.replace(advantages=algorithm.advantages(batch).advantages)
    runner: Any = MicroBatchRunner(plan, strategy)
    with phases.phase("plan"):
        rows = plan.mini_batches(plan.num_completions, 0, 0)[0]
        micro_batch = plan.micro_batches(rows, batch.lengths, strategy.data_rank)[0]
    with phases.phase("load"):
        return runner._load(batch, micro_batch)


def less(whole: list[float], part: list[float]) -> list[float]:
    """Return a phase's seconds without those of another inside it; memory was measured since that one's end."""
    return [whole[0] - part[0], whole[1] - part[1], whole[2]]


def draw(generator: random.Random = random.Random(2)) -> float:  # noqa: B008 - one generator for all calls
    """Return a reward, 0 or 1."""
    return float(generator.random() < 0.5)


# ---- all ranks of all cells ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run: a checkout, a size and a number of ranks."""

    checkout: Path
    million: float
    num_ranks: int

    def run(self, tokenizer: Path) -> dict[str, list[float]]:
        """Return the phases' rows: of each figure the largest of any rank."""
        groups, mean = SIZES[self.million]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        work = {"ranks": self.num_ranks, "groups": groups, "mean": mean, "port": port, "tokenizer": str(tokenizer)}
        python = self.checkout / ".venv/bin/python"
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / str(rank) for rank in range(self.num_ranks)]
            ranks = []
            for rank, output in enumerate(outputs):
                asked = {WORKER: json.dumps({**work, "rank": rank, "output": str(output)}), "OMP_NUM_THREADS": "1"}
                command = [str(python if python.exists() else sys.executable), str(Path(__file__).resolve())]
                environment = {**os.environ, **asked, "PYTHONPATH": str(self.checkout)}
                ranks.append(subprocess.Popen(command, cwd=self.checkout, env=environment))
            codes = [process.wait() for process in ranks]
            if any(codes):
                sys.exit(f"{self}: a rank failed")
            results = [json.loads(output.read_text()) for output in outputs]
        rows = {
            name: [max(result["phases"][name][i] for result in results) for i in range(3)]
            for name in results[0]["phases"]
        }
        rows["all"] = [sum(row[i] for row in rows.values()) for i in range(2)]
        rows["all"].append(max(result["peak"] for result in results))
        tokens, loaded = results[0]["tokens"], results[0]["loaded"]
        where = f"{self.checkout}, {self.num_ranks} ranks"
        print(f"{where}: {tokens:,} tokens in {groups * GROUP_SIZE:,} completions; rank 0 loads {loaded}", flush=True)
        return rows


def table(cells: dict[Path, dict[str, list[float]]]) -> Iterator[str]:
    """Yield a Markdown table with a row for each phase, and three columns for each checkout."""
    yield "| phase |" + "".join(f" {path.name} wall s | CPU s | GiB |" for path in cells)
    yield "|---|" + "---:|---:|---:|" * len(cells)
    names = dict.fromkeys(name for rows in cells.values() for name in rows)
    for name in [*(name for name in names if name != "all"), "all"]:
        cell = (
            f" {row[0]:.3f} | {row[1]:.3f} | {row[2] / GIB:.3f} |" if (row := rows.get(name)) else " | | |"
            for rows in cells.values()
        )
        yield f"| {name} |" + "".join(cell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--checkout", type=Path, nargs="+", default=[here], help="by default this one")
    parser.add_argument("--tokens", type=float, nargs="+", default=[0.1, 1.0, 8.0], choices=SIZES, help="in millions")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    tokenizer = here / "models/SmolLM2-135M-Instruct"
    parser.add_argument("--tokenizer", type=Path, default=tokenizer, help="folder; scripts/fetch_smollm2.py gets one")
    options = parser.parse_args()
    for million in options.tokens:
        for num_ranks in options.ranks:
            cells = {
                path.resolve(): Cell(path.resolve(), million, num_ranks).run(options.tokenizer.resolve())
                for path in options.checkout
            }
            print(f"\n{million:g} million tokens, {num_ranks} ranks\n")
            print("\n".join(table(cells)) + "\n", flush=True)


if __name__ == "__main__":
    if WORKER in os.environ:
        asked = json.loads(os.environ[WORKER])
        Path(asked["output"]).write_text(json.dumps(measure(asked)))
    else:
        main()
