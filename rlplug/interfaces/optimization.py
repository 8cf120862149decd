"""The optimisation seam: a change to the model that must prove that it took effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Effect:
    """One thing that an optimisation changed, in words that a user can check, such as "replaced 49 modules"."""

    description: str


class Optimization(ABC):
    """Edits the policy before or after it is sharded. Enabled without an effect, it stops the run."""

    def before_shard(self, model: nn.Module) -> None:  # noqa: B027 - overriding is optional
        """Edit the whole model, before parameters become shards."""

    def after_shard(self, model: nn.Module) -> None:  # noqa: B027 - overriding is optional
        """Edit the sharded model."""

    @abstractmethod
    def effects(self) -> list[Effect]:
        """Return what was changed; called after both edits. An empty list is an error of the configuration."""
