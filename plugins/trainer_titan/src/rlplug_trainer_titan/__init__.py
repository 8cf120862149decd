"""TorchTitan's models and parallelism as a trainer of rlplug."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_trainer_titan.trainer import TorchTitan

__all__ = ["TorchTitan"]

__getattr__ = late_names(__name__, {"TorchTitan": "trainer"})
