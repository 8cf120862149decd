"""One of two ranks that share a tensor-parallel engine, whose host only notes what it is asked; prints what it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trtllm_cases as cases
from on_double import CPUAsGPU, RolloutOnDouble
from rlplug_rollout_trtllm import colocated
from rlplug_rollout_trtllm.gpu import TrainerGPU
from rlplug_rollout_trtllm.sampling import Output
from torch import Tensor

from rlplug.interfaces import Placement
from rlplug.types import SamplingParams

CALLS: list[Any] = []


class NotingHost:
    """In the place of an engine: weights cannot be opened from another process without a GPU."""

    async def start(self, arguments: Any, groups: Any, bundles: Any, sleeps: bool, devices: str | None = None) -> str:
        CALLS.append(["start", arguments["tensor_parallel_size"], bundles, devices])
        return "1.3.0"

    async def update_weights(self, payload: dict[str, str]) -> None:
        CALLS.append(["update_weights", sorted(payload)])

    async def generate(self, name: str, prompt_ids: Any, sampling: Any) -> Output:
        return Output((7,), (-0.5,), "stop")

    def __getattr__(self, name: str) -> Any:
        async def note(*_: Any) -> None:
            CALLS.append([name])

        return note


class Rank(RolloutOnDouble):
    def make_gpu(self, device: torch.device) -> TrainerGPU:
        gpu = CPUAsGPU(torch.device("cpu", dist.get_rank()))
        gpu.reduce = _handle  # type: ignore[method-assign]
        return gpu


def _handle(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    return len, (tensor.nbytes,)


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    colocated.EngineHost = NotingHost  # type: ignore[assignment,misc]
    engine = Rank(tensor_parallel_size=2)
    engine.start(cases.spec(folder), Placement(torch.device("cpu"), rank, world_size=2))
    report = engine.update_weights(cases.buckets(folder, 1 << 30), 5)
    completions = engine.generate(cases.requests(3), SamplingParams(4))
    engine.sleep()
    engine.close()
    versions = [completion.policy_version for completion in completions]
    print(json.dumps({"calls": CALLS, "versions": versions, "bytes": report.num_bytes}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
