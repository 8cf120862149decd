"""Training of models that a packed row does not suit: layers with a state keep sequences apart, or rows are padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_hybrids.trainer import HybridTrainer, PaddedTrainer

__all__ = ["HybridTrainer", "PaddedTrainer"]

__getattr__ = late_names(__name__, {"HybridTrainer": "trainer", "PaddedTrainer": "trainer"})
