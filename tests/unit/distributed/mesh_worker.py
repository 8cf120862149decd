"""One rank of a mesh: ``python mesh_worker.py JOBS.json``, started by ``run_jobs`` with torchrun's variables.

Each job, by name, has a ``kind``, ``axes`` (of the strategy) and what the kind needs. Rank 0 writes ``results.pt``
beside the jobs.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlplug.distributed.mesh import local_part
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.models import weight_files
from rlplug.models.build import build_policy, build_reference
from rlplug.models.config import ModelConfig, load_tokenizer
from rlplug.models.critic import CriticConfig
from rlplug.models.critic.network import build_critic
from rlplug.models.transformers_trainer import TRANSFORMERS


def make_strategy(axes: dict[str, object]) -> RLFSDP2Strategy:
    """Set a strategy up as the trainer does."""
    strategy = RLFSDP2Strategy(timeout_s=60, **axes)
    strategy.accelerator = CPUAccelerator()
    strategy.cluster_environment = TorchElasticEnvironment()
    size = strategy.cluster_environment.world_size()
    strategy.parallel_devices = [torch.device("cpu")] * size
    strategy._lightning_module = SimpleNamespace()
    strategy.setup_environment()
    return strategy


def full(tensors):
    return {name: tensor.full_tensor().detach().clone() for name, tensor in tensors}


def gradients(model):
    return full((name, parameter.grad) for name, parameter in model.named_parameters())


def facts(strategy, job):
    """Which rank is where."""
    groups = [strategy.data_group, strategy.sequence_group]
    mine = {
        "data": (strategy.data_rank, strategy.data_size),
        "sequence": (strategy.sequence_rank, strategy.sequence_size),
        "tensor": strategy.tensor_size,
        "axes": strategy.mesh.mesh_dim_names,
        "groups": [group and dist.get_process_group_ranks(group) for group in groups],
        "sampler": strategy.distributed_sampler_kwargs,
    }
    return strategy.gather([mine])


def update(strategy, job):
    """Two micro-batches of rows that differ by data rank; what was communicated, gradients, norm, clipped gradients."""
    policy, effects = build_policy(ModelConfig(path=job["folder"], dtype="float32"), [], strategy, TRANSFORMERS)
    tokens = torch.tensor(job["tokens"])  # [data ranks, micro-batches, rows, tokens]
    weight = 1 / strategy.sequence_size  # ranks that share rows see them all here, so each takes a share of the loss
    passes = []
    for index, rows in enumerate(tokens[strategy.data_rank]):
        strategy.set_last_micro_batch(policy, is_last=index == tokens.shape[1] - 1)
        with CommDebugMode() as communication:
            loss_of(policy, rows).mul(weight).backward()
        counts = {str(name).split(".")[-1]: n for name, n in communication.get_comm_counts().items()}
        passes.append((counts, sum(unit_is_gathered(unit) for unit in policy.modules())))
    results = {
        "effects": [effect.description for effect in effects],
        "passes": passes,
        "units": [name for name, module in policy.named_modules() if isinstance(module, FSDPModule)],
        "local": strategy.gather([sum(p.to_local().numel() for p in policy.parameters())]),
        "gradients": gradients(policy),
        "norm": strategy.gather([strategy.clip_grad_norm(policy, None)]),
    }
    results["norm_again"] = strategy.clip_grad_norm(policy, job["max_norm"])
    results["clipped"] = gradients(policy)
    with torch.no_grad():
        policy(input_ids=tokens[0, 0])
    results["gathered_after_forward_only"] = sum(unit_is_gathered(unit) for unit in policy.modules())
    return results


def unit_is_gathered(unit):
    return isinstance(unit, FSDPModule) and any("DTensor" not in type(p.data).__name__ for p in unit.parameters())


def loss_of(model, rows):
    """A sum over rows of logprobs, weighted so that no two tokens weigh the same."""
    logprobs = model(input_ids=rows).logits[:, :-1].float().log_softmax(-1)
    taken = logprobs.gather(-1, rows[:, 1:, None]).squeeze(-1)
    return (taken * (1 + torch.arange(taken.numel()).view_as(taken) % 5)).sum()


class LargestAllocation(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes; views of others are not made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_view = any(returned.alias_info is not None for returned in function._schema.returns)
        if isinstance(result, torch.Tensor) and not result.is_meta and not is_view:
            local = local_part(result)
            self.numel = max(self.numel, local.untyped_storage().nbytes() // local.element_size())
        return result


class CountingFile:
    """A safetensors file that counts the bytes which are read of it."""

    num_bytes = 0

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)

    def keys(self):
        return self.opened.keys()

    def get_slice(self, name):
        self.slice = self.opened.get_slice(name)
        return self

    def get_shape(self):
        return self.slice.get_shape()

    def get_dtype(self):
        return self.slice.get_dtype()

    def __getitem__(self, part):
        tensor = self.slice[part]
        CountingFile.num_bytes += tensor.nbytes
        return tensor


def load(strategy, job):
    """Build every network, and say what it took and what it holds."""
    config = ModelConfig(**job["policy"])
    open_file = weight_files.safe_open
    torch.manual_seed(17)
    generator = torch.get_rng_state()
    watch, CountingFile.num_bytes = LargestAllocation(), 0
    with mock.patch.object(
        weight_files, "safe_open", lambda *args, **options: CountingFile(open_file(*args, **options))
    ):
        with watch:
            policy, effects = build_policy(config, [], strategy, TRANSFORMERS)
        num_bytes = CountingFile.num_bytes
        reference, more = build_reference(None, config, [], strategy, TRANSFORMERS)
        is_left = torch.equal(torch.get_rng_state(), generator)
        critic, last = build_critic(CriticConfig(seed=4), policy, config, [], strategy)
    return {
        "bytes": strategy.gather([num_bytes]),
        "largest": strategy.gather([watch.numel]),
        "generator_is_left": strategy.gather([is_left]),
        "effects": [effect.description for effect in [*effects, *more, *last]],
        "policy": full(policy.named_parameters()) | dict(policy.named_buffers()),
        "reference": full(reference.named_parameters()) | dict(reference.named_buffers()),
        "critic": full(critic.named_parameters()) | dict(critic.named_buffers()),
        "frozen": [any(p.requires_grad for p in reference.parameters()), reference.training],
        "logits": policy(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]])).logits.detach(),
        "meta": [name for name, tensor in policy.state_dict().items() if tensor.is_meta],
    }


def export(strategy, job):
    """Write the policy out, from shards."""
    from rlplug.models.export import export_policy

    config = ModelConfig(path=job["folder"], dtype="float32")
    policy, _ = build_policy(config, [], strategy, TRANSFORMERS)
    folder, rank, tokenizer = Path(job["out"]), dist.get_rank(), load_tokenizer(config)
    export_policy(policy, tokenizer, torch.bfloat16, folder, rank, TRANSFORMERS, job["max_bytes"])
    dist.barrier()
    return {}


def away(strategy, job):
    """The last rank is away for longer than tensors may take; what each exchange gave, and that tensors then fail."""
    dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    rank = dist.get_rank()
    exchanges = {
        "gather": lambda: strategy.gather([rank]),
        "gather_arrays": lambda: strategy.gather_arrays(np.array([rank])).tolist(),
        "any_rank": lambda: strategy.any_rank(rank == 1),
        "barrier": strategy.barrier,
        "broadcast": lambda: strategy.broadcast(rank, src=1),
        "tensors": lambda: dist.all_reduce(torch.ones(1)),
    }
    found = {}
    for name, exchange in exchanges.items():
        time.sleep(2.5 if rank == 1 else 0)
        try:
            found[name] = exchange()
        except RuntimeError:
            found[name] = "failed"
    return found


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    jobs = json.loads(path.read_text())
    results = {name: globals()[job["kind"]](make_strategy(job["axes"]), job) for name, job in jobs.items()}
    if dist.get_rank() == 0:
        torch.save(results, path.with_name("results.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
