"""Options of the weight sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlplug.errors import ConfigError
from rlplug.types.ranges import Count, CountOrZero, check_ranges


@dataclass(frozen=True)
class WeightSyncConfig:
    """Format in which weights are sent to the engine.

    Args:
        dtype: ``fp8_block`` sends the linear layers of attention and MLP in FP8 (e4m3), with a float32 scale for
            each block of 128 x 128; the engine calculates with them in FP8, and the trainer goes on in its own dtype.
            ``null`` sends all weights in ``model.policy.dtype``.
        keep: Patterns (of ``fnmatch``) of names of linear layers that stay in ``model.policy.dtype``, such as
            ``*.self_attn.*``. A pattern that matches none stops the run.
        keep_first_layers: Number of blocks at the start whose linear layers all stay in ``model.policy.dtype``.
        keep_last_layers: Number of such blocks at the end.
        power_of_two_scales: Round scales up to powers of two, which weights lose nothing by. Some engines do that
            themselves on some GPUs, and then round weights a second time.
        bucket_mib: Largest size of a bucket in which weights are sent, in MiB.
    """

    dtype: Literal["fp8_block"] | None = None
    keep: list[str] = field(default_factory=list)
    keep_first_layers: CountOrZero = 0
    keep_last_layers: CountOrZero = 0
    power_of_two_scales: bool = True
    bucket_mib: Count = 1024

    def __post_init__(self) -> None:
        check_ranges(self, "model.weight_sync")
        others = (self.keep, self.keep_first_layers, self.keep_last_layers, not self.power_of_two_scales)
        if self.dtype is None and any(others):
            raise ConfigError(
                "model.weight_sync says which layers are kept or how scales are rounded, and its dtype is null: set "
                "model.weight_sync.dtype to fp8_block, or remove the rest."
            )
