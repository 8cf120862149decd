"""Probes of passes whose rows, losses or models are others than those of a first pass."""

from __future__ import annotations

from typing import Final

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlplug.distributed.mesh import local_part
from rlplug_devkit.optimizations.late_probes import LateProbes
from rlplug_devkit.trainers.cases import rows

LOUD: Final = 1e4
"""What the loss is multiplied by."""


class SizeProbes(LateProbes):
    """Probes of a policy with optimizations."""

    loss_factor = 1.0
    effects: list[str]

    def flipped(self) -> Tensor:
        """Return values of all rows in one packed row, the last one first."""
        return self.run(rows().map(lambda tensor: tensor.flip(0)), rows().num_sequences)

    def loud(self) -> dict[str, Tensor]:
        """Return gradients of a loss that is ``LOUD`` times as large, over ``LOUD``."""
        self.loss_factor = LOUD
        try:
            found = self.gradients_of(rows().num_sequences)
        finally:
            self.loss_factor = 1.0
        self.policy.zero_grad()
        return {name: gradient / LOUD for name, gradient in found.items()}

    def saved_without_gradients(self) -> int:
        """Return the bytes that a pass without gradients saves for a backward pass."""
        num_bytes = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal num_bytes
            num_bytes += local_part(tensor).nbytes
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.run(rows(), rows().num_sequences)
        return num_bytes

    def effects_of_the_second(self) -> list[str]:
        """Return the effects on the model that ``second`` built before."""
        return self.effects
