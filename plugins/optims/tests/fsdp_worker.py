"""One rank of real sharded passes: ``python fsdp_worker.py FOLDER``, with the environment that torchrun gives.

Rank 0 writes ``results.pt``: for each case the loss, gradients and effects, and weights after steps with optimizers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from optims_models import SAMPLING, set_gradients, tiny_batch, tiny_model, weighted
from ranks import fit_and_save
from rlplug_optims import (
    BackwardPrefetch,
    CompileBlocks,
    EntropyCheckpointing,
    EntropyChunking,
    ForwardPrefetch,
    FusedLogprobs,
    GradientCheckpointing,
    Muon,
    SelectiveCheckpointing,
)
from rlplug_optims.activation_offload import offload_blocks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlplug.distributed.fsdp_units import transformer_blocks, transformer_units
from rlplug.errors import ConfigError
from rlplug.models.forward import policy_forward
from rlplug.models.packing import pack

CASES = {
    "plain": list,
    "checkpointing": lambda: [GradientCheckpointing()],
    "selective": lambda: [SelectiveCheckpointing()],
    "fused": lambda: [FusedLogprobs(chunk_size=5)],
    "entropy": lambda: [EntropyChunking(chunk_size=5), EntropyCheckpointing()],
    "compile": lambda: [CompileBlocks(dynamic=False, backend="aot_eager")],
    "forward 1": lambda: [ForwardPrefetch()],
    "forward 3": lambda: [ForwardPrefetch(depth=3)],
    "backward 2": lambda: [BackwardPrefetch()],
    "together": lambda: [
        CompileBlocks(dynamic=False, backend="eager"),
        GradientCheckpointing(every_n_blocks=2),
        FusedLogprobs(chunk_size=5),
        ForwardPrefetch(depth=2),
        BackwardPrefetch(depth=3),
    ],
}
CASES_OF_TIED = ("plain", "selective", "fused", "forward 3", "together")
"""What runs with tied embeddings too, which belong to the root unit."""
NUM_STEPS = 3
MUON = {"lr": 0.01, "weight_decay": 0.1}


class Worker(LightningModule):
    automatic_optimization = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.results: dict[str, object] = {}

    def configure_model(self):
        if not hasattr(self, "model"):
            self.model = tiny_model("llama")
            self.trainer.strategy.shard(self.model, torch.float32, transformer_units(self.model))

    def configure_optimizers(self):
        return Muon(self.model.named_parameters(), **MUON)

    def training_step(self, tick, index):
        for name, make in CASES.items():
            self.results[f"llama/{name}"] = self.case("llama", make())
        for name in CASES_OF_TIED:
            self.results[f"qwen3/{name}"] = self.case("qwen3", CASES[name]())
        self.results["llama/offload"] = self.case("llama", [], offload=True)
        self.results["keeps gathered"] = self.keeps_gathered()
        self.results["muon"] = self.steps()

    def case(self, family, optimizations, offload=False):
        """Return what the passes of this rank's rows give, and what proves the optimisations."""
        torch._dynamo.reset()
        model = tiny_model(family)
        try:
            for optimization in optimizations:
                optimization.before_shard(model)
            if offload:
                offload_blocks(transformer_blocks(model), 0)
            self.trainer.strategy.shard(model, torch.float32, transformer_units(model))
            effects = []
            for optimization in optimizations:
                optimization.after_shard(model)
                effects.append([effect.description for effect in optimization.effects()])
        except ConfigError as refused:
            return {"refused": str(refused)}
        order = {direction: prefetched(model, direction) for direction in ("forward", "backward")}
        for _ in range(2):  # FSDP learns the order of units in the first pass
            model.zero_grad()
            loss = self.backward_of_rows(model)
        dist.all_reduce(loss)
        named = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        return {"loss": loss, "gradients": named, "effects": effects, "prefetch": order}

    def backward_of_rows(self, model):
        batch = tiny_batch()
        mine = range(self.global_rank, batch.num_sequences, self.trainer.world_size)
        mask = torch.zeros_like(batch.response_mask)
        mask[list(mine)] = batch.response_mask[list(mine)]
        batch = batch.replace(response_mask=mask)
        output = policy_forward(model, pack(batch.flat()), SAMPLING, "gradient")
        loss = weighted(batch.grid(output.tokens.logprobs), batch.grid(output.entropy))
        loss.backward()
        return loss.detach()

    def keeps_gathered(self):
        """Return what BackwardPrefetch says where nothing is gathered in the backward pass."""
        strategy = self.trainer.strategy
        strategy.reshard_after_forward = False
        result = self.case("llama", [BackwardPrefetch()])
        strategy.reshard_after_forward = True
        return result

    def steps(self):
        """Train; after the first step, go on with a fresh optimizer that loads the checkpoint of the former."""
        optimizer = self.optimizers().optimizer
        for step in range(NUM_STEPS):
            if step == 1:
                state = get_optimizer_state_dict(self.model, optimizer)
                optimizer = Muon(self.model.named_parameters(), lr=7.0)
                set_optimizer_state_dict(self.model, optimizer, state)
            set_gradients(self.model, step)
            optimizer.step()
        shards = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
        assert all(isinstance(shard, DTensor) for shard in shards)
        return {name: parameter.detach().full_tensor() for name, parameter in self.model.named_parameters()}


def prefetched(model, direction):
    """Return the names of the units that each FSDP unit prefetches."""
    names = {id(unit._get_fsdp_state()): name for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    units = {name: model.get_submodule(name)._get_fsdp_state() for name in names.values()}
    lists = {name: getattr(state, f"_states_to_{direction}_prefetch") for name, state in units.items()}
    return {name: [names[id(state)] for state in states] for name, states in lists.items()}


def main() -> None:
    torch.set_num_threads(1)
    folder, world_size = Path(sys.argv[1]), int(sys.argv[2])
    fit_and_save(Worker(folder), folder, world_size)


if __name__ == "__main__":
    main()
