"""Training of hybrid models on packed rows: layers with a state keep the sequences of a row apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplug.late_names import late_names

if TYPE_CHECKING:
    from rlplug_hybrids.trainer import HybridTrainer

__all__ = ["HybridTrainer"]

__getattr__ = late_names(__name__, {"HybridTrainer": "trainer"})
