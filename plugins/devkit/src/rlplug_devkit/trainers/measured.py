"""What one rank measures of a trainer: a network, built as the core does, and the probes of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlplug.config import RunConfig
from rlplug.distributed.mesh import local_part
from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.interfaces.algorithm import Algorithm
from rlplug.interfaces.trainer import ModelConfig, ModelTrainer
from rlplug.interfaces.weight_sync import FP8Weights
from rlplug.models.build import build_policy
from rlplug.models.config import load_tokenizer
from rlplug.models.export import export_policy
from rlplug.models.forward import policy_forward
from rlplug.models.lm_head import LMHead, LMHeadOutput, LogprobRequest, lm_head_of
from rlplug.models.packing import pack
from rlplug.setup.checks.trainer import check_trainer
from rlplug.weight_sync.buckets import weight_buckets
from rlplug_devkit.padded_rows import PaddedRows
from rlplug_devkit.process_guard import ProcessGuard
from rlplug_devkit.trainers.cases import LEARNING_RATE, LONG_LENGTHS, MAX_NORM, SAMPLING, Case, loss_weights, rows

BUCKET_BYTES: Final = 1 << 12
"""Size of buckets, so small that a sync of a tiny model takes several."""
KEY: Final = "model.policy"
RANDOM_SEED: Final = 3
NUM_PASSES: Final = 3

Weights = list[tuple[str, Tensor]]


def run_config(trainer: ModelTrainer, model: ModelConfig) -> RunConfig:
    """Return the parts of a run that ``check_trainer`` reads."""
    return RunConfig(model, cast(Algorithm, None), torch.optim.SGD, trainer=trainer)


class Measured:
    """A network of the trainer, and the probes, in the order of ``PROBES``; each is a collective operation."""

    def __init__(self, trainer: ModelTrainer, case: Case, strategy: RLFSDP2Strategy) -> None:
        self.trainer = trainer
        self.case = case
        self.strategy = strategy
        self.config = ModelConfig(str(case.folder), dtype="float32")
        self.guard = ProcessGuard(kept=[case.folder], only_kept=True)
        self.policy: Any = None
        self.optimizer: Any = None

    # ---- the network ----------------------------------------------------------------------------------------------

    def empty(self) -> dict[str, Any]:
        """Describe the network before it is sharded."""
        network = self.trainer.empty_network(self.config, KEY)
        parameters, units = list(network.parameters()), self.trainer.fsdp_units(network)
        inside = [{id(parameter): parameter.numel() for parameter in unit.parameters()} for unit in units]
        rest = sum(parameter.numel() for parameter in parameters if not any(id(parameter) in unit for unit in inside))
        gathered = [rest, *(sum(unit.values()) for unit in inside)]
        asked = ("config", "generation_config", "get_output_embeddings")
        return {
            "off meta": [name for name, parameter in network.named_parameters() if not parameter.is_meta],
            "gathered at once": max(gathered) / sum(parameter.numel() for parameter in parameters),
            "dtypes": sorted({str(parameter.dtype) for parameter in parameters}),
            "training": network.training,
            "missing": [name for name in asked if getattr(network, name, None) is None],
        }

    def build(self) -> dict[str, Any]:
        """Build the network as a run does, and return what this rank holds of it."""
        before = torch.get_rng_state()
        mesh = self.strategy.mesh_sizes(dist.get_world_size())
        check_trainer(run_config(self.trainer, self.config), mesh)
        self._build()
        whole = sum(parameter.numel() for parameter in self.policy.parameters())
        local = sum(local_part(parameter).numel() for parameter in self.policy.parameters())
        return {
            "shares": self.strategy.gather([local / whole]),
            "generator is left": torch.equal(torch.get_rng_state(), before),
        }

    def _build(self) -> None:
        policy, _ = build_policy(self.config, [], self.strategy, self.trainer)
        self.policy = policy
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.strategy.model, self.strategy.optimizers = self.policy, [self.optimizer]

    # ---- weights --------------------------------------------------------------------------------------------------

    def sync(self, fp8: FP8Weights | None = None) -> Weights:
        """Return what a weight sync sends, in its order."""
        buckets = weight_buckets(
            self.policy, torch.float32, BUCKET_BYTES, fp8, weights=self.trainer.hf_weights(self.policy)
        )
        return [(name, tensor.clone()) for bucket in buckets for name, tensor in bucket]

    def sync_fp8(self) -> Weights:
        """Return what a weight sync sends with the blocks' matrices in FP8."""
        names = [weight.name for each in self.trainer.hf_weights(self.policy).values() for weight in each]
        return self.sync(FP8Weights(quantized=tuple(name for name in names if "proj" in name), kept=()))

    def random(self) -> Weights:
        """Return the weights of a network that was drawn instead of loaded."""
        config = ModelConfig(str(self.case.folder), init="random", dtype="float32", seed=RANDOM_SEED)
        drawn, _ = build_policy(config, [], self.strategy, self.trainer)
        buckets = weight_buckets(drawn, torch.float32, weights=self.trainer.hf_weights(drawn))
        return [(name, tensor.clone()) for bucket in buckets for name, tensor in bucket]

    # ---- passes ---------------------------------------------------------------------------------------------------

    def my_rows(self, size: int, num_rows: int) -> list[list[int]]:
        """Return this rank's rows in micro-batches of ``size``."""
        strategy = self.strategy
        mine = list(range(strategy.data_rank, num_rows, strategy.data_size))
        return [mine[first : first + size] for first in range(0, len(mine), size)]

    def run(self, batch: PaddedRows, size: int, train: bool = False) -> Tensor:
        """Return logprobs [B, T] of all ranks' rows, in micro-batches of ``size`` rows; with gradients to train."""
        micro_batches, strategy = self.my_rows(size, batch.num_sequences), self.strategy
        whole = torch.zeros(batch.input_ids.shape)
        for number, indices in enumerate(micro_batches, start=1):
            taken = batch.map(partial(_take, indices=indices))
            packed = pack(taken.flat(), strategy.sequence_rank, strategy.sequence_size, strategy.sequence_group)
            with torch.set_grad_enabled(train):
                if train:
                    strategy.set_last_micro_batch(self.policy, is_last=number == len(micro_batches))
                logprobs = taken.grid(policy_forward(self.policy, packed, SAMPLING, "none").tokens.logprobs)
                if train:
                    (loss_weights(batch.input_ids.shape)[indices] * logprobs).sum().backward()  # type: ignore[no-untyped-call]
            whole[indices] = logprobs.detach()
        dist.all_reduce(whole, group=strategy.data_group)
        return whole

    def gradients_of(self, size: int) -> dict[str, Tensor]:
        """Return whole gradients by checkpoint name, of a pass in micro-batches of ``size`` rows."""
        self.policy.zero_grad()
        self.run(rows(), size, train=True)
        return dict(self._gradients())

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        weights = self.trainer.hf_weights(self.policy)
        for name, parameter in self.policy.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                yield from ((weight.name, weight.of(whole).clone()) for weight in weights[name])

    def forward(self) -> dict[str, Tensor]:
        """Return logprobs of all rows in a packed row, also backwards, of each row alone, and with one row changed."""
        return {
            "packed": self.run(rows(), rows().num_sequences),
            "backwards": self.run(rows().map(_backwards), rows().num_sequences).flip(0),
            "alone": self.run(rows(), 1),
            "changed": self.run(rows(is_changed=True), rows().num_sequences),
        }

    def long(self) -> Tensor:
        """Return logprobs of rows of which one is long, in one packed row."""
        return self.run(rows(lengths=LONG_LENGTHS), len(LONG_LENGTHS))

    def kept_tensors(self) -> int:
        """Return how many more tensors are alive after some passes than before."""
        for size in (1, rows().num_sequences):  # what is made once for a size may stay
            self.run(rows(), size)
        before = _num_tensors()
        for _ in range(NUM_PASSES):
            self.run(rows(), rows().num_sequences)
        return _num_tensors() - before

    def twice(self) -> tuple[Tensor, Tensor]:
        """Return the logprobs of a training pass, and of the same pass again."""
        passes = []
        for _ in range(2):
            self.policy.zero_grad()
            passes.append(self.run(rows(), rows().num_sequences, train=True))
        return passes[0], passes[1]

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients of a single micro-batch."""
        return self.gradients_of(rows().num_sequences)

    def clip(self) -> dict[str, Any]:
        """Clip those gradients; return the norm of each rank, and the clipped gradients."""
        norms = self.strategy.gather([self.strategy.clip_grad_norm(self.policy, MAX_NORM)])
        return {"norms": norms, "clipped": dict(self._gradients())}

    def fused(self) -> dict[str, Tensor]:
        """Return gradients of a single micro-batch, with an output layer that returns logprobs, not logits."""
        head = lm_head_of(self.policy)
        head.fused = plain_logprobs
        try:
            return self.gradients()
        finally:
            head.fused = None

    def split(self) -> dict[str, Tensor]:
        """Return gradients of two micro-batches."""
        return self.gradients_of(-(-len(self.my_rows(1, rows().num_sequences)) // 2))

    # ---- a step, and what is left of it ---------------------------------------------------------------------------

    def step(self) -> dict[str, Any]:
        """Take an optimizer step with those gradients; return the weights of the next sync, and logprobs."""
        self.optimizer.step()
        return {"weights": self.sync(), "logprobs": self.run(rows(), rows().num_sequences)}

    def export(self) -> str:
        """Export the policy and return the folder."""
        folder = self.case.out / "export"
        tokenizer = load_tokenizer(self.config)
        export_policy(
            self.policy, tokenizer, torch.float32, folder, self.strategy.global_rank, self.trainer, BUCKET_BYTES
        )
        return str(folder)

    def resume(self) -> dict[str, Weights]:
        """Return the weights after one more step, and after that step from a checkpoint in a new network."""
        folder, strategy = self.case.out / "checkpoint", self.strategy
        checkpoint = {
            "state_dict": strategy.lightning_module_state_dict(),
            "optimizer_states": [strategy.optimizer_state(self.optimizer)],
            "rlplug": {},
        }
        strategy.save_checkpoint(checkpoint, folder)
        dist.barrier()
        went_on = self._another_step()
        self._build()
        strategy.load_checkpoint(folder)
        return {"went on": went_on, "resumed": self._another_step()}

    def changes(self) -> list[str]:
        """Return what the calls until now have changed of a rank's process, and of the model's folder."""
        found = sorted(text for name, text in self.guard.changes.items())
        return list(dict.fromkeys(text for each in self.strategy.gather([found]) for text in each))

    def _another_step(self) -> Weights:
        self.gradients_of(rows().num_sequences)
        self.optimizer.step()
        return self.sync()


PROBES: Final[tuple[Callable[[Measured], Any], ...]] = (
    Measured.empty,
    Measured.build,
    Measured.sync,
    Measured.sync_fp8,
    Measured.random,
    Measured.forward,
    Measured.long,
    Measured.kept_tensors,
    Measured.twice,
    Measured.gradients,
    Measured.clip,
    Measured.fused,
    Measured.split,
    Measured.step,
    Measured.export,
    Measured.resume,
    Measured.changes,
)
PROBE_NAMES: Final = [function.__name__ for function in PROBES]


def _num_tensors() -> int:
    gc.collect()
    return sum(isinstance(each, Tensor) for each in gc.get_objects())


def _backwards(tensor: Tensor) -> Tensor:
    return tensor.flip(0)


def _take(tensor: Tensor, indices: list[int]) -> Tensor:
    return tensor[indices]


def plain_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LogprobRequest) -> LMHeadOutput:
    """Return what a fused output layer does, without fusing anything; see ``FusedLMHead``."""
    return LMHead().from_logits(torch.nn.functional.linear(hidden, weight, bias), request)
