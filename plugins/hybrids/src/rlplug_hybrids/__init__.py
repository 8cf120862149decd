"""Training of hybrid models on packed rows: layers with a state keep the sequences of a row apart, or all rows are padded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_hybrids.trainer import HybridTrainer, PaddedTrainer

__all__ = ["HybridTrainer", "PaddedTrainer"]

__getattr__ = late_names(__name__, {"HybridTrainer": "trainer", "PaddedTrainer": "trainer"})
