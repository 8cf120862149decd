"""A rank of a trainer of four, in which two ranks share an engine: run by ``test_ranks.py``.

RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 python engine_ranks_trainer.py
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from rlplug_engines.colocated.colocated import require_neighbours

from rlplug.errors import ConfigError, RunError
from rlplug.interfaces import EngineFault, Placement
from rlplug.rollout.ranks import EngineRanks
from rlplug.types import Completion


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = EngineRanks(Placement(torch.device("cpu"), rank, 4), size=2, deadline_s=60)
    made: list[int] = []
    value = ranks.from_first(lambda: made.append(rank) or f"made by {rank}")
    gathered = ranks.gathered(f"handle of {rank}")
    done = Completion("a", (1, 2), (-1.0, -2.0), "stop", 4)

    def fails() -> None:
        raise EngineFault("it died", [done]) if rank == 0 else RunError(f"refused by {rank}")

    try:
        ranks.from_first(fails)
        raised = "nothing"
    except EngineFault as fault:
        raised = f"fault: {fault}, {fault.completions == [done]}"
    except RunError as problem:
        raised = f"refusal: {problem}"
    require_neighbours(ranks, "SGLang", rank)
    try:
        require_neighbours(ranks, "SGLang", 0)
        problem = ""
    except ConfigError as error:
        problem = str(error)
    print(json.dumps([ranks.is_first, value, made, gathered, raised, problem, [ranks.engine, ranks.index]]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
