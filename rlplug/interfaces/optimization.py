"""Optimisation interface: a change to a model that must prove that it took effect."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

from torch import nn

MYPY = False  # in place of TYPE_CHECKING, whose imports jsonargparse carries out
if MYPY:
    from rlplug.interfaces.memory import ActivationTraits

Network: TypeAlias = Literal["policy", "reference", "critic"]
"""Models of a run; each is loaded, edited and sharded on its own."""


@dataclass(frozen=True)
class Effect:
    """One change that an optimisation made, described so that a user can check it: "replaced 49 modules".

    Attributes:
        is_of_start: Whether it is about the first weights of what trains, which a checkpoint replaces.
    """

    description: str
    is_of_start: bool = False


class Optimization(ABC):
    """Base class of optimisations, which edit a model before or after sharding. One without an effect stops the run.

    Each model of ``applies_to`` that the run has gets a copy of its own. Before sharding, parameters are on the meta
    device: modules can be replaced and methods wrapped, but values can be neither read nor set.

    Attributes:
        applies_to: Models that it changes, an instance perhaps fewer. A reference policy runs forward only.
        conflicts: Class names of optimisations that this one excludes, each with the reason; one of the two must name
            the other.
        only_if_needed: Whether a GPU run leaves it out when the memory plan fits without it.
    """

    applies_to: tuple[Network, ...] = ("policy", "reference", "critic")
    conflicts: ClassVar[Mapping[str, str]] = MappingProxyType({})
    only_if_needed: bool = False

    def plan_memory(self, traits: ActivationTraits) -> ActivationTraits:
        """Return the properties of the training step with this optimisation; unchanged by default."""
        return traits

    def before_shard(self, model: nn.Module) -> None:  # noqa: B027 - overriding is optional
        """Edit the whole model, before its parameters are sharded."""

    def after_shard(self, model: nn.Module) -> None:  # noqa: B027 - overriding is optional
        """Edit the sharded model."""

    @abstractmethod
    def effects(self) -> list[Effect]:
        """Return the changes that were made, counted on this model, after both edits. An empty list stops the run."""
