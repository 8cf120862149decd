"""What an algorithm makes of a step, computed as the training loop does: advantages, then losses of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rlplug.interfaces.algorithm import Advantages, Algorithm, Denominators, LossOutput
from rlplug.types import Batch, StepBatch
from rlplug_devkit.algorithms.steps import Row, batch_of, end_to_end

LEAVES: Final = ("logprobs", "entropy", "values")
"""What a loss may have a gradient to; of rows and of micro-batches."""
SMALLEST: Final = 1e-2
"""Size of the terms that a sum may cancel out of: differences are measured against this at least."""


@dataclass(frozen=True)
class Step:
    """A step after its advantages, and what the models say of its tokens now."""

    algorithm: Algorithm
    batch: StepBatch
    """With ``old_logprobs``, ``advantages`` and ``returns``."""
    leaves: dict[str, Tensor]
    """float32 [N], by the names of ``LEAVES``."""

    @property
    def denominators(self) -> Denominators:
        """Counts of the step as a single mini-batch."""
        counts = self.batch.num_tokens
        return Denominators(int(counts.sum()), int((counts > 0).sum()))

    @property
    def trained_leaves(self) -> dict[str, Tensor]:
        """The leaves of the tokens that train, float32 [K]."""
        trains = torch.from_numpy(self.batch.per_token["response_mask"])
        return {name: leaf[trains] for name, leaf in self.leaves.items()}

    @property
    def all_rows(self) -> list[int]:
        return list(range(self.batch.num_sequences))


@dataclass
class Learned:
    """Losses of one or more micro-batches, added up as the loop does."""

    loss: Tensor
    """float32 []: the policy's, plus the critic's where there is one."""
    gradients: dict[str, Tensor]
    """float32 [N] of the whole step, by the names of ``LEAVES``."""
    metrics: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    minima: dict[str, float] = field(default_factory=dict)

    def add(self, other: Learned) -> None:
        """Add another micro-batch."""
        self.loss = self.loss + other.loss
        self.gradients = {name: gradient + other.gradients[name] for name, gradient in self.gradients.items()}
        for name, value in other.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)
        for name, value in other.minima.items():
            self.minima[name] = min(self.minima.get(name, value), value)


def step_of(algorithm: Algorithm, rows: Sequence[Row], result: Advantages, declared: bool = True) -> Step:
    """Return a step with the advantages that an algorithm returned.

    Args:
        algorithm: The algorithm.
        rows: The step's completions.
        result: What ``algorithm.advantages`` returned for them.
        declared: Leave out what the algorithm does not declare in ``needs``.
    """
    batch = batch_of(rows, algorithm.needs if declared else None)
    if result.of_sequences is not None:
        batch = batch.with_advantages(result.of_sequences)
    changes = {"advantages": result.of_tokens, "returns": result.returns, "response_mask": result.trains}
    batch = batch.replace(**{name: value for name, value in changes.items() if value is not None})
    batch = batch.with_tokens(old_logprobs=end_to_end(rows, "old_logprobs"))
    leaves = {name: end_to_end(rows, name) for name in LEAVES}
    has_new = bool(rows) and all(row.new_values is not None for row in rows)
    leaves["values"] = end_to_end(rows, "new_values") if has_new else leaves["values"] + 0.1
    return Step(algorithm, batch, leaves)


def advantages_of_rows(batch: StepBatch, result: Advantages) -> list[Tensor]:
    """Return the advantages of each row of a batch: of its tokens, or one for all of them."""
    if result.of_sequences is not None:
        return list(result.of_sequences)
    assert result.of_tokens is not None
    return list(torch.split(result.of_tokens, batch.num_tokens.tolist()))


def learn(step: Step, rows: Sequence[int], denominators: Denominators | None = None) -> Learned:
    """Return the losses and gradients of one micro-batch of a step; ``rows`` in any order."""
    selected = step.batch.select(rows)
    places = step.batch.tokens_of(np.asarray(rows))[selected.per_token["response_mask"]]
    leaves = {name: leaf[places] for name, leaf in step.leaves.items()}
    learned = learn_micro_batch(step.algorithm, selected.tokens, leaves, denominators or step.denominators)
    for name, gradient in learned.gradients.items():
        whole = torch.zeros_like(step.leaves[name])
        whole[places] = gradient
        learned.gradients[name] = whole
    return learned


def learn_micro_batch(
    algorithm: Algorithm, micro_batch: Batch, leaves: dict[str, Tensor], denominators: Denominators
) -> Learned:
    """Return the losses of a micro-batch and their gradients to ``leaves``, float32 [K]."""
    tracked = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    outputs = list(outputs_of(algorithm, micro_batch, tracked, denominators).values())
    total = torch.stack([output.loss for output in outputs]).sum()
    found: Sequence[Tensor | None] = [None] * len(tracked)
    if total.requires_grad:
        found = torch.autograd.grad(total, list(tracked.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(tracked.items(), found, strict=True)
    }
    learned = Learned(total.detach(), gradients)
    for output in outputs:
        learned.add(Learned(torch.zeros(()), {name: torch.zeros(()) for name in tracked}, **_numbers(output)))
    return learned


def outputs_of(
    algorithm: Algorithm, micro_batch: Batch, leaves: dict[str, Tensor], denominators: Denominators
) -> dict[str, LossOutput]:
    """Return what the losses of a micro-batch return, by the names of their methods."""
    entropy = leaves["entropy"] if algorithm.needs.entropy_gradient else leaves["entropy"].detach()
    outputs = {"loss": algorithm.loss(micro_batch, leaves["logprobs"], entropy, denominators)}
    if algorithm.needs.critic:
        outputs["value_loss"] = algorithm.value_loss(micro_batch, leaves["values"], denominators)
    return outputs


def unreached(algorithm: Algorithm, micro_batch: Batch, leaves: dict[str, Tensor], denominators: Denominators) -> str:
    """Return the loss of a micro-batch that depends on no leaf; empty where there is none.

    Args:
        leaves: float32 [K]
    """
    tracked = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    for name, output in outputs_of(algorithm, micro_batch, tracked, denominators).items():
        found = torch.autograd.grad(output.loss, list(tracked.values()), allow_unused=True)
        if all(gradient is None for gradient in found):
            return name
    return ""


def _numbers(output: LossOutput) -> dict[str, dict[str, float]]:
    parts = {"metrics": output.metrics, "maxima": output.maxima, "minima": output.minima}
    return {part: {name: float(value) for name, value in named.items()} for part, named in parts.items()}


def difference(found: Learned, expected: Learned, tolerance: float) -> str:
    """Return in words where two results differ; empty where they do not."""
    pairs = {"the loss": (found.loss, expected.loss)}
    pairs |= {f"the gradient to {name}": (found.gradients[name], expected.gradients[name]) for name in LEAVES}
    for part in ("metrics", "maxima", "minima"):
        some, others = getattr(found, part), getattr(expected, part)
        if some.keys() != others.keys():
            return f"{part} have the names {sorted(some)} and {sorted(others)}"
        pairs |= {name: (torch.tensor(some[name]), torch.tensor(others[name])) for name in some}
    for what, (one, other) in pairs.items():
        if not is_close(one, other, tolerance):
            return f"{what} differs by up to {float((one - other).abs().max()):.3g}"
    return ""


def is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether tensors differ by at most ``tolerance`` of the largest entry, or of ``SMALLEST``."""
    if found.shape != expected.shape:
        return False
    if not found.numel() or torch.equal(found, expected):  # infinite extremes of no tokens too
        return True
    allowed = tolerance * max(float(expected.abs().max()), SMALLEST)
    return float((found - expected).abs().max()) <= allowed


def joined(per_row: Sequence[Tensor]) -> Tensor:
    """Return tensors end to end, float32."""
    return torch.cat([torch.empty(0), *(row.reshape(-1).float() for row in per_row)])
