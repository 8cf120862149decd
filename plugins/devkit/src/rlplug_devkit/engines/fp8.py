"""Checks of FP8 weights: the engine uses each sync's weights, and refuses weights that are not valid FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from rlplug.interfaces.weight_sync import Bucket, FP8Weights
from rlplug_devkit.claims import applies_to
from rlplug_devkit.engines.bench import Bench, Variant
from rlplug_devkit.engines.weights import RefusalChecks

NUM_SYNCS = 20
TARGET = "model.layers.1.mlp.down_proj.weight"
SCALES = FP8Weights.scale_name(TARGET)

Edit: TypeAlias = Callable[[dict[str, Tensor]], None]
"""Function that changes a bucket of a sync, in place."""

USED_AS_SENT = (
    "A weight is its values times the scale of their block of 128 x 128, also inside fused or re-packed weights: look "
    "for scales of the former sync, in another order, or transposed."
)


def as_bfloat16(bucket: dict[str, Tensor]) -> None:
    bucket[TARGET] = bucket[TARGET].to(torch.bfloat16)
    del bucket[SCALES]


def without_scales(bucket: dict[str, Tensor]) -> None:
    del bucket[SCALES]


def with_flat_scales(bucket: dict[str, Tensor]) -> None:
    bucket[SCALES] = bucket[SCALES].flatten()


def with_stray_scales(bucket: dict[str, Tensor]) -> None:
    bucket["lm_head.weight_scale_inv"] = bucket[SCALES]


class FP8Checks(RefusalChecks):
    """Checks of ``update_weights`` with ``PolicySpec.fp8``. They need another model, and so an engine of their own."""

    @applies_to("fp8_refit")
    def test_fp8_weights_are_used_as_they_were_sent(self, bench: Bench) -> None:
        """A running engine must update everything that it has captured or re-packed at each sync."""
        bench.holding("first", family="fp8")
        for number in range(NUM_SYNCS):
            variant: Variant = "changed" if number % 2 == 0 else "first"
            bench.sync(variant)
            bench.assert_holds(variant, f"refit {number}", [2, 30], f"This was sync {number + 2}. {USED_AS_SENT}")

    @applies_to("fp8_refit")
    def test_fp8_buckets_of_one_weight(self, bench: Bench) -> None:
        bench.holding("first", family="fp8")
        bench.sync("changed", max_bytes=1)
        bench.assert_holds("changed", "one weight", [2, 30], USED_AS_SENT)

    @applies_to("fp8_refit")
    @pytest.mark.parametrize(
        ("edit", "name"),
        [
            (as_bfloat16, TARGET),
            (without_scales, TARGET),
            (with_flat_scales, SCALES),
            (with_stray_scales, "lm_head.weight_scale_inv"),
        ],
        ids=["bfloat16", "no scales", "flat scales", "stray scales"],
    )
    def test_what_is_not_fp8_is_refused(self, bench: Bench, edit: Edit, name: str) -> None:
        """The engine must not fall back to another dtype."""

        def edited() -> Iterator[Bucket]:
            for bucket in bench.policy("changed").buckets(self.placement().device):
                tensors = dict(bucket)
                if TARGET in tensors:
                    edit(tensors)
                yield list(tensors.items())

        bench.holding("first", family="fp8")
        self.assert_refuses_sync(bench, edited(), name, f"a weight {edit.__name__.replace('_', ' ')}")

    @applies_to("fp8_refit")
    def test_scales_of_another_bucket_are_refused(self, bench: Bench) -> None:
        def apart() -> Iterator[Bucket]:
            for bucket in bench.policy("changed").buckets(self.placement().device, max_bytes=1):
                yield from ([pair] for pair in bucket)

        bench.holding("first", family="fp8")
        self.assert_refuses_sync(bench, apart(), "self_attn.q_proj", "values and scales in buckets of their own")

    @applies_to("fp8_refit")
    def test_fp8_weights_of_experts(self, bench: Bench) -> None:
        """This check comes last, since it needs a model of its own."""
        bench.holding("first", family="fp8_experts")
        for number in range(3):
            variant: Variant = "changed" if number % 2 == 0 else "first"
            bench.sync(variant)
            bench.assert_holds(variant, f"experts {number}", [2, 30], USED_AS_SENT)
