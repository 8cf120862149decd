"""One rank that trains with torchao's 8-bit AdamW: ``python adamw_8bit_worker.py FOLDER``.

On two ranks it steps and writes a checkpoint; on one it loads that. Both write what they then have.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from optims_models import set_gradients, wide_model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit

NUM_STEPS, RATE = 3, 0.01


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model = fully_shard(wide_model())
    optimizer = AdamW8bit(model.named_parameters(), lr=RATE)
    results: dict[str, Any] = {}
    if dist.get_world_size() == 2:
        for step in range(NUM_STEPS):
            set_gradients(model, step)
            optimizer.step()
        results["weights"] = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
        dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "checkpoint")
    else:
        state = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder / "checkpoint")
        set_optimizer_state_dict(model, optimizer, state)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    results["state"] = {f"{name}.{key}": whole(value) for name, kept in state.items() for key, value in kept.items()}
    results["kinds"] = {type(getattr(v, "_local_tensor", v)).__name__ for s in state.values() for v in s.values()}
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{dist.get_world_size()}.pt")
    dist.barrier()
    dist.destroy_process_group()


def whole(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    local = value.to_local()
    local = local.dequantize() if hasattr(local, "codes") else local
    return DTensor.from_local(
        local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
    ).full_tensor()


if __name__ == "__main__":
    main()
