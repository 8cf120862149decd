"""One rank of sequence-parallel forward and backward passes: ``python sequence_worker.py FOLDER ...``.

Rank 0 writes logprobs, entropies and the gradients' sum over ranks, with a loss of its own for every rank as the
update has it: all compute the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from critics import load_critic
from rlplug_devkit.padded_rows import PaddedRows
from safetensors.torch import load_file, save_file

from rlplug.models.config import ModelConfig
from rlplug.models.critic import CriticConfig
from rlplug.models.forward import critic_forward, policy_forward
from rlplug.models.loading import load_model
from rlplug.models.packing import pack
from rlplug.types import SamplingParams


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for folder in map(Path, sys.argv[1:]):
        results = compute(folder)
        if dist.get_rank() == 0:
            save_file(results, folder / "results.safetensors")
    dist.destroy_process_group()


def compute(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "batch.safetensors")
    weights = tensors.pop("weights")
    rows = PaddedRows(**tensors)
    batch = pack(rows.flat(), dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    config = ModelConfig(path=str(folder), dtype="float32")
    policy, critic = load_model(config), load_critic(CriticConfig(seed=3), config)
    output = policy_forward(policy, batch, SamplingParams(temperature=0.8, top_k=9), "gradient")
    values = critic_forward(critic, batch)
    ((output.tokens.logprobs + 0.3 * output.entropy + values) * rows.trained(weights)).sum().backward()
    results = {
        "logprobs": rows.grid(output.tokens.logprobs.detach()),
        "entropy": rows.grid(output.entropy.detach()),
        "sampled": rows.grid(output.tokens.sampled_logprobs),
        "values": rows.grid(values.detach()),
    }
    for name, module in (("policy", policy), ("critic", critic)):
        for parameter_name, parameter in module.named_parameters():
            dist.all_reduce(parameter.grad)
            results[f"{name}.{parameter_name}"] = parameter.grad
    return results


if __name__ == "__main__":
    main()
