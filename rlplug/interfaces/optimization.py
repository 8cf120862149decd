"""The optimisation seam: a change to a model that must prove that it took effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

from torch import nn

from rlplug.interfaces.memory import ActivationTraits

Network: TypeAlias = Literal["policy", "reference", "critic"]
"""The networks of a run; each is loaded, edited and sharded by itself."""


@dataclass(frozen=True)
class Effect:
    """One thing that an optimisation changed, in words that a user can check, such as "replaced 49 modules"."""

    description: str


class Optimization(ABC):
    """Edits a model before or after it is sharded. Enabled without an effect, it stops the run.

    Each network of ``applies_to`` that the run has gets a copy of its own. Before sharding, parameters are on the meta
    device: modules can be exchanged and methods wrapped, values can be neither read nor set.
    """

    applies_to: ClassVar[tuple[Network, ...]] = ("policy", "reference", "critic")
    """Networks that it can change. A reference policy runs forward only."""
    conflicts: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Class names of optimisations that cannot be enabled beside this one, and why; named on one side is enough."""
    only_if_needed: bool = False
    """Leave it out of a GPU run whose memory plan fits without it."""

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        """Return what an update's memory follows from once this is applied; unchanged by default."""
        return traits

    def before_shard(self, model: nn.Module) -> None:  # noqa: B027 - overriding is optional
        """Edit the whole model, before parameters become shards."""

    def after_shard(self, model: nn.Module) -> None:  # noqa: B027 - overriding is optional
        """Edit the sharded model."""

    @abstractmethod
    def effects(self) -> list[Effect]:
        """Return what was changed; called after both edits. An empty list is an error of the configuration."""
