"""What one rank does to measure optimizations: it builds policies with and without them, and runs the probes."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from rlplug.errors import ConfigError
from rlplug.interfaces.optimization import Optimization
from rlplug.models.build import build_policy, build_reference
from rlplug.models.forward import policy_forward
from rlplug.models.lm_head import EntropyMode
from rlplug.models.packing import pack
from rlplug.models.transformers_trainer import TransformersTrainer
from rlplug.types import SamplingParams
from rlplug_devkit.optimizations.network_probes import NetworkProbes
from rlplug_devkit.optimizations.partners import blocks_not_called
from rlplug_devkit.optimizations.structure import functions_of, structure_of
from rlplug_devkit.padded_rows import PaddedRows
from rlplug_devkit.process_guard import ProcessGuard
from rlplug_devkit.trainers.cases import LEARNING_RATE, LENGTHS, SAMPLING, Case, loss_weights, rows
from rlplug_devkit.trainers.ranks import make_strategy

PLAIN: Final = "plain"
PLAIN_AGAIN: Final = "plain, after all others"
NUM_DRAWN: Final = 8
"""Passes over drawn rows."""


@dataclass(frozen=True)
class VariantJob:
    """What the ranks of one start do: every variant of the optimizations on every case of their number."""

    cases: tuple[Case, ...]
    variants: Mapping[str, Sequence[Optimization]]
    """Optimizations by the variant's name; ``PLAIN`` and ``PLAIN_AGAIN`` are added."""


def run_variants(job: VariantJob) -> None:
    """Run every probe on every case with every variant; rank 0 writes ``results.pt`` in the case's folder. Collective.

    An outcome is ``{"value": ...}``, ``{"refused": message}`` where building raised a ConfigError, or ``{"error":
    traceback}``.
    """
    for case in job.cases:
        strategy = make_strategy(case.mesh)
        case.out.mkdir(parents=True, exist_ok=True)
        outcomes: dict[str, dict[str, dict[str, Any]]] = {}
        variants: dict[str, Sequence[Optimization]] = {PLAIN: (), **job.variants, PLAIN_AGAIN: ()}
        for number, (name, optimizations) in enumerate(variants.items()):
            own_folder = dataclasses.replace(case, out=case.out / str(number))
            outcomes[name] = _outcomes(Optimized(own_folder, strategy, optimizations))
        if strategy.global_rank == 0:
            torch.save(outcomes, case.out / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def _outcomes(optimized: Optimized) -> dict[str, dict[str, Any]]:
    """Return the outcome of each probe, the same on all ranks; of the first that fails for those after it."""
    outcomes: dict[str, dict[str, Any]] = {}
    for number, function in enumerate(PROBES):
        outcome: dict[str, Any]
        try:
            with optimized.guard.around(function.__name__):
                outcome = {"value": function(optimized)}
        except ConfigError as refusal:
            outcome = {"refused": str(refusal)}
        except Exception:  # noqa: BLE001 - the check of this probe fails with it
            outcome = {"error": traceback.format_exc()}
        problems: list[dict[str, Any] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, None if "value" in outcome else outcome)
        problem = next((each for each in problems if each), None)
        outcomes[function.__name__] = problem or outcome
        if problem:
            return outcomes | {later.__name__: {"after": function.__name__} for later in PROBES[number + 1 :]}
    return outcomes


class Optimized(NetworkProbes):
    """A policy with optimizations, and the probes, in the order of ``PROBES``; each is a collective operation."""

    def __init__(self, case: Case, strategy: Any, optimizations: Sequence[Optimization]) -> None:
        super().__init__(TransformersTrainer(), case, strategy)
        self.optimizations = list(optimizations)
        self.effects: list[str] = []
        self.guard = ProcessGuard(kept=[case.folder], free=[case.out])

    def _build(self) -> None:
        self.policy, effects = build_policy(self.config, self.optimizations, self.strategy, self.trainer)
        self.effects = [effect.description for effect in effects[1:]]  # the first is what was loaded
        trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=0.9)
        self.strategy.model, self.strategy.optimizers = self.policy, [self.optimizer]

    def build(self) -> dict[str, Any]:
        """Build the policy as a run does, and return what proves the optimizations."""
        torch._dynamo.reset()
        guard = ProcessGuard(free=[self.case.out])
        with guard.around("building"):
            self._build()
        return {
            "effects": self.effects,
            "of ranks": self._of_ranks(self.effects),
            "moved": sorted(guard.generators),
            "changed": sorted(guard.changes),
        }

    def structure(self) -> dict[str, Any]:
        """Describe the policy, and what a checkpoint of it names."""
        optimizer_names = self.strategy.optimizer_state(self.optimizer)["param_groups"]
        return {
            "modules": structure_of(self.policy),
            "functions": functions_of(self.policy),
            "parameters": {
                name: f"{parameter.dtype} {list(parameter.shape)}{'' if parameter.requires_grad else ', frozen'}"
                for name, parameter in self.policy.named_parameters()
            },
            "buffers": {name: f"{buffer.dtype} {list(buffer.shape)}" for name, buffer in self.policy.named_buffers()},
            "checkpoint": sorted(self.strategy.lightning_module_state_dict()),
            "optimizer": [sorted(group["params"]) for group in optimizer_names],
            "training": self.policy.training,
        }

    def _of_ranks(self, value: Any) -> list[Any]:
        """Return what each rank has as ``value``."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def run(
        self,
        batch: PaddedRows,
        size: int,
        train: bool = False,
        sampling: SamplingParams = SAMPLING,
        entropy_mode: EntropyMode | None = None,
    ) -> Tensor:
        """Return logprobs, entropies and logprobs as sampled of all ranks' rows, [3, B, T]; with gradients to train."""
        micro_batches, strategy = self.my_rows(size, batch.num_sequences), self.strategy
        whole = torch.zeros(3, *batch.input_ids.shape)
        mode = entropy_mode or ("gradient" if train else "value")
        for number, indices in enumerate(micro_batches, start=1):
            taken = batch.map(partial(_take, indices=indices))
            packed = pack(taken.flat())
            with torch.set_grad_enabled(train):
                if train:
                    strategy.set_last_micro_batch(self.policy, is_last=number == len(micro_batches))
                output = policy_forward(self.policy, packed, sampling, mode)
                columns = (output.tokens.logprobs, output.entropy, output.tokens.sampled_logprobs)
                values = torch.stack([taken.grid(column) for column in columns])
                if train:
                    weights = loss_weights(batch.input_ids.shape)[indices]
                    (self.loss_factor * torch.stack([weights, weights.cos()]) * values[:2]).sum().backward()  # type: ignore[no-untyped-call]
            whole[:, indices] = values.detach()
        dist.all_reduce(whole, group=strategy.data_group)
        return whole

    def forward(self) -> dict[str, Tensor]:
        """Return logprobs and entropies of all rows in one packed row, and of each row alone."""
        return {"packed": self.run(rows(), rows().num_sequences), "alone": self.run(rows(), 1)}

    def step(self) -> dict[str, Any]:
        """Take a step with the gradients of a single micro-batch; return the weights of the next sync, and values."""
        self.gradients_of(rows().num_sequences)
        self.optimizer.step()
        return {"weights": dict(self.sync()), "values": self.run(rows(), rows().num_sequences)}

    def exported(self) -> dict[str, str]:
        """Return hashes of the files of an export, by name."""
        folder = Path(self.export())
        dist.barrier()
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}

    def nothing(self) -> dict[str, Any]:
        """Return the gradients of a pass in which no token trains, as a rank without rows left takes it."""
        batch = rows()
        self.policy.zero_grad()
        values = self.run(batch.replace(response_mask=torch.zeros_like(batch.response_mask)), 2, train=True)
        return {"values": values, "gradients": dict(self._gradients())}

    def beside(self) -> dict[str, Tensor]:
        """Return values of this policy before and after another one of other weights was built, and those of both."""
        before = self.run(rows(), rows().num_sequences)
        own, config = (self.policy, self.optimizer), self.config
        self.config = dataclasses.replace(config, init="random", seed=5)
        self._build()
        other = self.run(rows(), rows().num_sequences)
        self.policy, self.optimizer, self.config = *own, config
        self.strategy.model, self.strategy.optimizers = self.policy, [self.optimizer]
        return {"before": before, "after": self.run(rows(), rows().num_sequences), "other": other}

    def reference(self) -> dict[str, Any]:
        """Return effects and values of a frozen reference policy with the optimizations that apply to one."""
        model, effects = build_reference(None, self.config, self.optimizations, self.strategy, self.trainer)
        own, self.policy = self.policy, model
        try:
            return {"effects": [effect.description for effect in effects], "values": self.run(rows(), 3)}
        finally:
            self.policy = own

    def requests(self) -> dict[str, Tensor]:
        """Return values of passes with top-k and top-p, with greedy sampling, and without entropies."""
        whole = partial(self.run, rows(), rows().num_sequences)
        return {
            "top-k and top-p": whole(sampling=dataclasses.replace(SAMPLING, top_k=9, top_p=0.8)),
            "greedy": whole(sampling=dataclasses.replace(SAMPLING, temperature=0.0)),
            "without entropies": whole(entropy_mode="none"),
        }

    def measured(self) -> dict[str, Tensor] | str:
        """Return gradients of a pass whose entropies are only measured, or why such a pass is refused."""
        self.policy.zero_grad()
        try:
            self.run(rows(), rows().num_sequences, train=True, entropy_mode="value")
        except ConfigError as refusal:
            return str(refusal)
        return dict(self._gradients())

    def drawn(self) -> dict[str, Tensor]:
        """Return values of passes over drawn rows; some train, and a step follows."""
        draw, found = random.Random(0), dict[str, Tensor]()
        torch._dynamo.reset()  # some compile for each length that comes
        self.policy.zero_grad()
        for number in range(NUM_DRAWN):
            lengths = [(draw.randint(1, 12), draw.choice([0, 1, 7, 40, 130])) for _ in LENGTHS]
            size, trains = draw.choice([len(LENGTHS) // 2, len(LENGTHS)]), draw.random() < 0.5
            sampling = dataclasses.replace(SAMPLING, temperature=draw.choice([0.6, 1.0, 1.4]))
            found[f"pass {number + 1}"] = self.run(rows(lengths=lengths), size, trains, sampling)
            if trains:
                self.optimizer.step()
                self.policy.zero_grad()
        return found

    def not_called(self) -> dict[str, list[int]]:
        """Return the blocks of which passes have called no wrapper of a partner, by the partner's class name."""
        return blocks_not_called(self.policy)

    def process(self) -> dict[str, str]:
        """Return what all probes together changed of the process and of files."""
        moved = {name: f"a pass moves the global generator {name}" for name in sorted(self.guard.generators)}
        return self.guard.changes | moved


PROBES: Final[tuple[Callable[[Any], Any], ...]] = (
    Optimized.build,
    Optimized.structure,
    Optimized.sync,
    Optimized.forward,
    Optimized.gradients,
    Optimized.split,
    Optimized.step,
    Optimized.resume,
    Optimized.exported,
    Optimized.nothing,
    Optimized.single,
    Optimized.beside,
    Optimized.reference,
    Optimized.second,
    Optimized.effects_of_the_second,
    Optimized.long,
    Optimized.bfloat16,
    Optimized.saved,
    Optimized.kept,
    Optimized.requests,
    Optimized.measured,
    Optimized.flipped,
    Optimized.loud,
    Optimized.saved_without_gradients,
    Optimized.adapters,
    Optimized.critic,
    Optimized.large,
    Optimized.biased,
    Optimized.unread,
    Optimized.drawn,
    Optimized.head_alone,
    Optimized.not_called,
    Optimized.process,
)


def _take(tensor: Tensor, indices: list[int]) -> Tensor:
    return tensor[indices]
