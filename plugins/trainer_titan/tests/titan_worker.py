"""One rank of TorchTitan's models: ``python titan_worker.py JOBS.json``, with the environment that torchrun gives.

Each job, by name, has a model's ``folder``, sizes of the strategy's ``axes``, ``options`` of the trainer, and names of
``optimizations``. Rank 0 writes ``results.pt`` beside the jobs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import rlplug_trainer_titan.trainer as trainer_module
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from rlplug_devkit.padded_rows import PaddedRows
from rlplug_optims import CompileBlocks, FusedLogprobs, GradientCheckpointing, SelectiveCheckpointing
from rlplug_trainer_titan import TorchTitan
from titan_cases import HEAD_SEED, SAMPLING, batch, given_experts, weights_of_tokens
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import FP8Weights, ModelConfig
from rlplug.models import loading
from rlplug.models.build import build_policy
from rlplug.models.critic import CriticConfig
from rlplug.models.critic.network import build_critic
from rlplug.models.export import export_policy
from rlplug.models.forward import critic_forward, policy_forward, value_head_forward
from rlplug.models.packing import pack
from rlplug.weight_sync.buckets import weight_buckets

OPTIMIZATIONS = {
    "FusedLogprobs": lambda: FusedLogprobs(chunk_size=5),
    "GradientCheckpointing": GradientCheckpointing,
    "SelectiveCheckpointing": SelectiveCheckpointing,
    "CompileBlocks": lambda: CompileBlocks(backend="aot_eager"),
}


def make_strategy(tensor: int = 1, replicate: int = 1) -> RLFSDP2Strategy:
    """Set a strategy up as the trainer does."""
    strategy = RLFSDP2Strategy(replicate=replicate, tensor=tensor, timeout_s=60)
    strategy.accelerator = CPUAccelerator()
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * strategy.cluster_environment.world_size()
    strategy._lightning_module = SimpleNamespace()
    strategy.setup_environment()
    return strategy


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Count the elements of the slices that are read from safetensors files."""
    reads: list[int] = []

    class Counted:
        def __init__(self, stored: Any) -> None:
            self.stored = stored

        def __getitem__(self, slices: Any) -> Tensor:
            part: Tensor = self.stored[slices]
            reads.append(part.numel())
            return part

    def stored_weights(*args: Any) -> Iterator[tuple[str, Counted]]:
        return ((name, Counted(stored)) for name, stored in loading.stored_weights(*args))

    with patch.object(trainer_module, "stored_weights", stored_weights):
        yield reads


def full(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def pass_of(policy: Any, strategy: RLFSDP2Strategy, trainer: TorchTitan, is_given: bool = False) -> dict[str, Any]:
    """Run forward and backward on this rank's rows; return the results of all rows, and gradients."""
    mine, rows = own_rows(strategy)
    policy.zero_grad()
    strategy.set_last_micro_batch(policy, is_last=True)
    micro = pack(rows.flat())
    if is_given:
        row = micro.packed
        trainer.router_replay(policy).set(given_experts(row.input_ids[0], row.position_ids[0], len(policy.routers)))
    output = policy_forward(policy, micro, SAMPLING, "gradient")
    parts = {"logprobs": rows.grid(output.tokens.logprobs), "entropy": rows.grid(output.entropy)}
    (weights_of_tokens(batch().input_ids)[mine] * (parts["logprobs"] + 0.3 * parts["entropy"])).sum().backward()
    results: dict[str, Any] = {name: whole_batch(part, strategy) for name, part in parts.items()}
    results["gradients"] = gradients_of(policy, trainer.hf_weights(policy))
    return results


def results_of(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Build, run forward and backward, sync and export; return what rank 0 sees."""
    strategy, trainer = make_strategy(**job["axes"]), TorchTitan(**job["options"])
    counters.clear()
    config = ModelConfig(job["folder"], dtype="float32")
    trainer.check(config, "model.policy", strategy.mesh_sizes(dist.get_world_size()))
    optimizations = [OPTIMIZATIONS[name]() for name in job["optimizations"]]
    with counted_reads() as reads:
        policy, effects = build_policy(config, optimizations, strategy, trainer)

    held = sum(p.to_local().numel() for p in policy.parameters())
    read = torch.tensor([sum(reads) / held])
    dist.all_reduce(read, dist.ReduceOp.MAX)
    results: dict[str, Any] = {"read": float(read)}
    if "CompileBlocks" in job["optimizations"]:  # other lengths, for which the blocks' graph must serve too
        policy_forward(policy, pack(batch().flat()), SAMPLING, "gradient").tokens.logprobs.sum().backward()
    for _ in range(2):  # twice: a pass must leave the network as it was
        results |= pass_of(policy, strategy, trainer)
    if policy.routers:
        results["replay"] = pass_of(policy, strategy, trainer, is_given=True)
        trainer.router_replay(policy)  # one that no experts were given yet
        pass_of(policy, strategy, trainer)
    weights = trainer.hf_weights(policy)
    results["norm"] = strategy.clip_grad_norm(policy, None)
    results["graphs"] = counters["stats"]["unique_graphs"]
    results["critics"] = {
        "shared": critic_results(policy, config, strategy, trainer, share_trunk=True),
        "own": critic_results(policy, config, strategy, trainer, share_trunk=False),
    }
    results["weights"] = dict(synced(policy, weights, None))
    fp8 = FP8Weights(quantized=tuple(n for n in results["weights"] if "proj" in n), kept=())
    results["fp8"] = dict(synced(policy, weights, fp8))
    results["effects"] = [effect.description for effect in effects]
    results["units"] = [name for name, module in policy.named_modules() if isinstance(module, FSDPModule)]
    results["largest shard"] = max(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor))
    export_policy(policy, SimpleNamespace(save_pretrained=str), torch.float32, out, strategy.global_rank, trainer)
    return results


def critic_results(
    policy: Any, config: ModelConfig, strategy: RLFSDP2Strategy, trainer: TorchTitan, share_trunk: bool
) -> dict[str, Any]:
    """Return the values of a critic and the gradients of a loss over them; a shared trunk gets the policy's as well."""
    critic: Any
    critic, _ = build_critic(
        CriticConfig(seed=HEAD_SEED, share_trunk=share_trunk), policy, config, [], strategy, trainer
    )
    mine, rows = own_rows(strategy)
    micro, weights = pack(rows.flat()), weights_of_tokens(batch().input_ids)[mine]
    policy.zero_grad()
    for model in (policy, critic):
        strategy.set_last_micro_batch(model, is_last=True)
    if share_trunk:
        output = policy_forward(policy, micro, SAMPLING, "gradient")
        values, trunk, head = rows.grid(value_head_forward(critic, output, micro)), policy, critic
        of_policy = rows.grid(output.tokens.logprobs + 0.3 * output.entropy)
        (weights * (values + of_policy)).sum().backward()
    else:
        values, trunk, head = rows.grid(critic_forward(critic, micro)), critic.trunk, critic.head
        (weights * values).sum().backward()
    gradients = gradients_of(trunk, trainer.hf_weights(trunk))
    gradients |= {f"head.{name}": full(parameter.grad) for name, parameter in head.named_parameters()}
    return {"values": whole_batch(values, strategy), "gradients": gradients}


def own_rows(strategy: RLFSDP2Strategy) -> tuple[Tensor, PaddedRows]:
    """Return the indices of this rank's rows, and the rows."""
    rows = batch()
    mine = torch.arange(strategy.data_rank, len(rows.input_ids), strategy.data_size)
    return mine, rows.map(lambda tensor: tensor[mine])


def whole_batch(part: Tensor, strategy: RLFSDP2Strategy) -> Tensor:
    """Return the rows of all ranks, of which those of the tensor axis computed the same."""
    whole = torch.zeros(batch().input_ids.shape)
    whole[own_rows(strategy)[0]] = part.detach()
    dist.all_reduce(whole)
    return whole / strategy.tensor_size


def gradients_of(network: Any, weights: Any) -> dict[str, Tensor]:
    """Return gradients by the names of a checkpoint."""
    return {
        weight.name: weight.of(full(parameter.grad))
        for name, parameter in network.named_parameters()
        for weight in weights[name]
    }


def synced(policy: Any, weights: Any, fp8: FP8Weights | None) -> Any:
    for bucket in weight_buckets(policy, torch.float32, 1 << 12, fp8, weights):
        yield from ((name, tensor.clone()) for name, tensor in bucket)


if __name__ == "__main__":
    jobs = Path(sys.argv[1])
    done = {name: results_of(job, jobs.parent / name) for name, job in json.loads(jobs.read_text()).items()}
    if dist.get_rank() == 0:
        torch.save(done, jobs.parent / "results.pt")
    dist.barrier()
    dist.destroy_process_group()
