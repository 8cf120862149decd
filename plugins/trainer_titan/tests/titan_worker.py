"""One rank of TorchTitan's models: ``python titan_worker.py JOBS.json``, with the environment that torchrun gives.

Each job, by name, has a model's ``folder``, sizes of the strategy's axes, options of the trainer, and names of
optimizations. Rank 0 writes ``results.pt`` beside the jobs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from rlplug_optims import CompileBlocks, FusedLogprobs, GradientCheckpointing, SelectiveCheckpointing
from rlplug_trainer_titan import TorchTitan
from titan_cases import SAMPLING, batch, weights_of_tokens
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces import FP8Weights, ModelConfig
from rlplug.models.build import build_policy
from rlplug.models.export import export_policy
from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack_batch
from rlplug.weight_sync.buckets import weight_buckets

OPTIMIZATIONS = {
    "FusedLogprobs": lambda: FusedLogprobs(chunk_size=5),
    "GradientCheckpointing": GradientCheckpointing,
    "SelectiveCheckpointing": SelectiveCheckpointing,
    "CompileBlocks": lambda: CompileBlocks(dynamic=False, backend="aot_eager"),
}


def make_strategy(tensor: int = 1, replicate: int = 1) -> RLFSDP2Strategy:
    """Set a strategy up as the trainer does."""
    strategy = RLFSDP2Strategy(tensor=tensor, replicate=replicate, timeout_s=60)
    strategy.accelerator = CPUAccelerator()
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * strategy.cluster_environment.world_size()
    strategy._lightning_module = SimpleNamespace()
    strategy.setup_environment()
    return strategy


def full(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def results_of(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Build, run forward and backward on this rank's rows, sync and export; return what rank 0 sees."""
    strategy, trainer = make_strategy(**job["axes"]), TorchTitan(**job["options"])
    tensor_size = strategy.tensor_size
    counters.clear()
    config = ModelConfig(job["folder"], dtype="float32")
    trainer.check(config, "model.policy", tensor_size)
    optimizations = [OPTIMIZATIONS[name]() for name in job["optimizations"]]
    policy, effects = build_policy(config, optimizations, strategy, trainer)

    rows = batch()
    mine = torch.arange(strategy.data_rank, len(rows.input_ids), strategy.data_size)
    shape, results = rows.input_ids.shape, {}
    for _ in range(2):  # twice: a pass must leave the network as it was
        policy.zero_grad()
        strategy.set_last_micro_batch(policy, is_last=True)
        micro = pack_batch(rows.map(lambda tensor: tensor[mine]))
        output = policy_forward(policy, micro, SAMPLING, "gradient")
        parts = {"logprobs": output.tokens.logprobs, "entropy": output.entropy}
        (weights_of_tokens(torch.empty(shape))[mine] * (parts["logprobs"] + 0.3 * parts["entropy"])).sum().backward()
    for name, part in parts.items():
        whole = torch.zeros(shape)
        whole[mine] = part.detach()
        dist.all_reduce(whole)
        results[name] = whole / tensor_size  # ranks of the tensor axis computed the same rows

    weights = trainer.hf_weights(policy)
    results["gradients"] = {
        weight.name: weight.of(full(parameter.grad))
        for name, parameter in policy.named_parameters()
        for weight in weights[name]
    }
    results["norm"] = strategy.clip_grad_norm(policy, None)
    results["weights"] = dict(synced(policy, weights, None))
    fp8 = FP8Weights(quantized=tuple(n for n in results["weights"] if "proj" in n), kept=())
    results["fp8"] = dict(synced(policy, weights, fp8))
    results["effects"] = [effect.description for effect in effects]
    results["graphs"] = counters["stats"]["unique_graphs"]
    results["units"] = [name for name, module in policy.named_modules() if isinstance(module, FSDPModule)]
    results["largest shard"] = max(p.to_local().numel() for p in policy.parameters() if isinstance(p, DTensor))
    export_policy(
        policy, SimpleNamespace(save_pretrained=str), torch.float32, out, strategy.global_rank, trainer=trainer
    )
    return results


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
