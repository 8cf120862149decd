"""Statistics over the completions of a step, of which each rank has some."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Count, mean, variance and extremes of numbers. Of no numbers: 0, 0, 0, inf and -inf.

    Attributes:
        variance: Unbiased; 0 of fewer than two numbers.
    """

    count: int
    mean: float
    variance: float
    smallest: float
    largest: float

    @property
    def std(self) -> float:
        """Unbiased standard deviation."""
        return math.sqrt(self.variance)


@dataclass(frozen=True)
class StepStatistics:
    """Sums over all ranks, the same on every rank: in float64, added up in the order of ranks.

    Every method is collective: all ranks must call the same methods in the same order, a rank without completions too.

    Args:
        world_size: Number of ranks.
        device: Device of tensors that the ranks' process group exchanges.
    """

    world_size: int = 1
    device: torch.device | str = "cpu"

    def gather(self, values: Tensor) -> Tensor:
        """Return every rank's ``values``, which have the same shape everywhere: float64 [world_size, ...]."""
        mine = values.detach().to(torch.float64).cpu()
        if self.world_size == 1:
            return mine[None]
        gathered = mine.new_empty(self.world_size, *mine.shape, device=self.device)
        dist.all_gather(list(gathered), mine.to(self.device))
        return gathered.cpu()

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of every rank's ``values``, element by element: float64, of the same shape."""
        return self.gather(values).sum(dim=0)

    def mean(self, values: Tensor, mask: Tensor | None = None) -> float:
        """Return the mean of all ranks' values where ``mask`` is true; 0 of none."""
        chosen = (values if mask is None else values[mask]).to(torch.float64)
        total, count = self.sum(torch.stack([chosen.sum(), torch.tensor(float(chosen.numel()))])).tolist()
        return total / count if count else 0.0

    def moments(self, values: Tensor, mask: Tensor | None = None) -> Moments:
        """Return the moments of all ranks' values where ``mask`` is true."""
        chosen = (values if mask is None else values[mask]).detach().to(torch.float64).flatten()
        mine = torch.tensor([0.0, 0.0, 0.0, math.inf, -math.inf], dtype=torch.float64)
        if len(chosen):
            squares = (chosen - chosen.mean()).square().sum()
            mine = torch.stack([torch.tensor(float(len(chosen))), chosen.mean(), squares, chosen.min(), chosen.max()])
        counts, means, squares, smallest, largest = self.gather(mine).unbind(dim=1)
        count = float(counts.sum())
        mean = float((counts * means).sum()) / max(count, 1.0)
        # the squares about each rank's mean, moved to the mean of all (Chan, Golub and LeVeque, 1979)
        about_mean = float((squares + counts * (means - mean).square()).sum())
        return Moments(int(count), mean, about_mean / max(count - 1, 1.0), float(smallest.min()), float(largest.max()))


ONE_RANK: Final = StepStatistics()
"""Statistics of a step of which this process has all completions."""
