"""One of two ranks that share a tensor-parallel engine, whose host only notes what it is asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import on_double as cases
import torch
import torch.distributed as dist
from rlplug_rollout_trtllm import colocated
from rlplug_rollout_trtllm.sampling import Output
from torch import Tensor

from rlplug.interfaces import Placement
from rlplug.types import SamplingParams

CALLS: list[Any] = []


class NotingHost:
    """In the place of an engine: weights cannot be opened from another process without a GPU."""

    async def start(self, arguments: Any, bundles: Any, sleeps: bool, devices: str | None = None) -> str:
        CALLS.append(["start", arguments["tensor_parallel_size"], bundles.indices, devices])
        return "1.3.0"

    async def call(self, method: str, *arguments: Any) -> None:
        given = sorted(arguments[0]) if method == "update_weights" and arguments[0] else list(arguments)
        CALLS.append([method, *given])

    async def generate(self, name: str, prompt_ids: Any, sampling: Any) -> Output:
        return Output((7,), (-0.5,), "stop")

    async def close(self) -> None:
        CALLS.append(["close"])


class Rank(cases.RolloutOnDouble):
    def handle(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        return len, (tensor.nbytes,)


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    colocated.EngineHost = NotingHost  # type: ignore[assignment,misc]
    engine = Rank(tensor_parallel_size=2)
    engine.start(cases.spec(folder), Placement(torch.device("cpu", rank), rank, world_size=2))
    report = engine.update_weights(cases.buckets(folder, 1 << 30), 5)
    completions = engine.generate(cases.requests(3), SamplingParams(4))
    engine.sleep()
    engine.close()
    versions = [completion.policy_version for completion in completions]
    result = {"calls": CALLS, "versions": versions, "bytes": report.num_bytes}
    (Path(sys.argv[2]) / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
