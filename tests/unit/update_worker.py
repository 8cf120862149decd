"""Runs the real update on real processes: one rank, started by the fixture ``updated`` with torchrun's variables.

``python update_worker.py FOLDER`` reads ``model/`` and ``batch.safetensors`` there. Rank 0 writes ``results.pt``: what
came out, by name, and nothing of what should have come out.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from rlplug_algos.grpo import GRPO
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from rlplug.batching import BatchPlan, BatchSizes
from rlplug.interfaces import LossOutput, Needs
from rlplug.plugin_manager import plugins
from rlplug.policy import PolicyConfig, export_policy, load_model, load_tokenizer
from rlplug.rollout.buckets import weight_buckets
from rlplug.strategy import RLFSDP2Strategy
from rlplug.types import Batch, SamplingParams
from rlplug.update import NonFiniteUpdate, PolicyUpdate


class EntropyBonus(GRPO):
    """GRPO, and 0.1 times the mean entropy."""

    needs = Needs(entropy_gradient=True)

    def loss(self, micro_batch, logprobs, entropy, values, denominators):
        output = super().loss(micro_batch, logprobs, entropy, values, denominators)
        bonus = (entropy * micro_batch.response_mask).sum() / denominators.num_tokens
        return LossOutput(output.loss - 0.1 * bonus, output.metrics)


LOSSES = {
    "token": GRPO(),
    "sequence": GRPO(aggregation="sequence", kl_coefficient=0.1, clip=0.1),
    "entropy": EntropyBonus(),
}
SPLITS = {
    "1": {"micro_batch_size_per_gpu": 1},
    "3": {"micro_batch_size_per_gpu": 3},
    "all": {},
    "16 tokens": {"max_tokens_per_gpu": 16},
    "40 tokens": {"max_tokens_per_gpu": 40},
}
ROWS = {"some": [8, 3, 0, 10], "one": [5]}
SAMPLING = SamplingParams(temperature=0.8, top_k=10)


class Worker(LightningModule):
    automatic_optimization = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.batch = Batch(**load_file(folder / "batch.safetensors"))
        self.results: dict[str, object] = {}

    def configure_model(self):
        self.policy = load_model(PolicyConfig(path=str(self.folder / "model")))
        self.trainer.strategy.shard(self.policy, torch.float32)

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), lr=0.05)

    def training_step(self, tick, index):
        self.results["strategy"] = self.strategy_parts()
        for loss, algorithm in LOSSES.items():
            for split, limits in SPLITS.items():
                self.results[f"{loss}/{split}"] = self.accumulate(algorithm, limits, range(self.batch.num_sequences))
        for name, rows in ROWS.items():
            self.results[f"rows/{name}"] = self.accumulate(LOSSES["token"], SPLITS["1"], rows)
        for split, limits in SPLITS.items():
            self.results[f"forward/{split}"] = self.updater(limits).forward_only(self.policy, self.batch)
        self.results["clip"] = {max_norm: self.clip(max_norm) for max_norm in (None, 1e-3, 1e6)}
        self.results["nonfinite"] = self.nonfinite()
        self.results["on_policy"] = self.run(BatchSizes(**self.sizes()), self.batch.replace(old_logprobs=None))
        self.results["run"] = self.run(BatchSizes(**self.sizes(), mini_batch_size=4, num_epochs=2), self.batch)
        tokenizer = load_tokenizer(PolicyConfig(path=str(self.folder / "model")))
        export_policy(self.policy, tokenizer, torch.bfloat16, self.folder / "exported", self.global_rank)

    def sizes(self) -> dict[str, int]:
        return {"prompts_per_step": 4, "group_size": 3}

    def updater(self, limits, algorithm=LOSSES["token"], **options) -> PolicyUpdate:
        sizes = limits if isinstance(limits, BatchSizes) else BatchSizes(**self.sizes(), **limits)
        options = {"max_grad_norm": None, "skip_nonfinite": False, **options}
        return PolicyUpdate(
            policy=self.policy,
            algorithm=algorithm,
            plan=BatchPlan(sizes, self.trainer.world_size),
            strategy=self.trainer.strategy,
            sampling=SAMPLING,
            hook=plugins().hook,
            seed=3,
            **options,
        )

    def accumulate(self, algorithm, limits, rows):
        """Accumulate gradients; note after each backward pass what was reduced and whether gradients are there."""
        self.optimizers().zero_grad()
        passes = []

        def backward(loss):
            with CommDebugMode() if algorithm is LOSSES["token"] else nullcontext() as communication:
                self.manual_backward(loss)
            counts = communication.get_comm_counts() if communication else {}
            reduced = sum(number for name, number in counts.items() if "reduce_scatter" in str(name))
            passes.append((reduced, any(p.grad is not None for p in self.policy.parameters())))

        metrics, outputs = self.updater(limits, algorithm)._accumulate_gradients(rows, self.batch, backward)
        fillers = sum(micro.is_filler for micro, _ in outputs)
        return {
            "metrics": metrics,
            "gradients": self.gradients(),
            "passes": self.trainer.strategy.gather([passes]),
            "fillers": self.trainer.strategy.gather([fillers]),
        }

    def gradients(self):
        return {name: p.grad.full_tensor().clone() for name, p in self.policy.named_parameters()}

    def weights(self):
        return {name: p.detach().full_tensor().clone() for name, p in self.policy.named_parameters()}

    def clip(self, max_norm):
        self.accumulate(LOSSES["token"], SPLITS["3"], range(self.batch.num_sequences))
        before = self.gradients()
        norm = self.trainer.strategy.clip_grad_norm(self.policy, max_norm)
        return {"before": before, "norm": norm, "after": self.gradients()}

    def run(self, sizes, batch, **options):
        self.optimizers().zero_grad()
        before = self.weights()
        updater = self.updater(sizes, max_grad_norm=0.5, **options)
        try:
            metrics, sampled = updater.run(batch, self.optimizers(), self.manual_backward, step=2)
        except NonFiniteUpdate as problem:
            metrics, sampled = str(problem), None
        return {"before": before, "metrics": metrics, "sampled": sampled, "after": self.weights()}

    def nonfinite(self):
        """Row 5 is bad: the only mini-batch with it is the second of three."""
        advantages = self.batch.advantages.clone()
        advantages[5] = float("nan")
        bad, thirds = self.batch.replace(advantages=advantages), BatchSizes(**self.sizes(), mini_batch_size=4)
        return {
            "stopped": self.run(BatchSizes(**self.sizes()), bad),
            "skipped": self.run(BatchSizes(**self.sizes()), bad, skip_nonfinite=True),
            "stopped later": self.run(thirds, bad),
            "one skipped": self.run(thirds, bad, skip_nonfinite=True),
        }

    def strategy_parts(self):
        strategy = self.trainer.strategy
        half = load_model(PolicyConfig(path=str(self.folder / "model")))
        strategy.shard(half, torch.bfloat16)
        logits = half(self.batch.input_ids).logits
        logits.float().sum().backward()
        buckets = weight_buckets(self.policy, torch.float32, 1 << 14)
        return {
            "world_size": dist.get_world_size(),
            "mesh_size": strategy.device_mesh["data_parallel"].size(),
            "units": [name for name, module in self.policy.named_modules() if isinstance(module, FSDPModule)],
            "local_elements": strategy.gather([sum(p.to_local().numel() for p in self.policy.parameters())]),
            "dtypes": [
                str({p.dtype for p in half.parameters()}),
                str(logits.dtype),
                str(half.lm_head.weight.grad.dtype),
            ],
            "gathered": strategy.gather([f"{strategy.global_rank}a", f"{strategy.global_rank}b"]),
            "gathered_unevenly": strategy.gather(["x"] * strategy.global_rank),
            "any_rank": [
                strategy.any_rank(False),
                strategy.any_rank(strategy.global_rank == 0),
                strategy.any_rank(True),
            ],
            "buckets": [[(name, tensor.clone()) for name, tensor in bucket] for bucket in buckets],
        }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    worker = Worker(folder)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(sys.argv[2]),
        strategy=RLFSDP2Strategy(timeout_s=60),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(worker, train_dataloaders=torch.utils.data.DataLoader([0]))
    if trainer.is_global_zero:
        torch.save(worker.results, folder / "results.pt")


if __name__ == "__main__":
    main()
