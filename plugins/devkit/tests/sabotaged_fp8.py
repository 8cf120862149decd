"""Engines with a mistake each in their FP8 weights. ``test_sabotage.py`` runs the checks on them.

They are judged as engines that also calculate in FP8 are, which is less strict than these need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from rlplug_devkit.engines.fp8 import FP8Checks
from rlplug_devkit.models import NUM_EXPERTS
from sabotage import Sabotaged
from torch import Tensor

from rlplug.interfaces import Bucket, FP8Weights, SyncReport
from rlplug.rollout.hf_engine import HFRollout
from rlplug.weight_sync.fp8_quantize import quantize_blocks
from rlplug.weight_sync.hf_names import hf_views


class EditsScales(HFRollout):
    """Loads other scales than those that came."""

    def edited(self, name: str, scales: Tensor) -> Tensor:
        raise NotImplementedError

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        return super().update_weights((self._edit(bucket) for bucket in buckets), version)

    def _edit(self, bucket: Bucket) -> Bucket:
        return [(name, self.edited(name, t) if name.endswith("_scale_inv") else t) for name, t in bucket]


class SwapsScales(EditsScales):
    """Gives two rows of blocks each other's scales."""

    def edited(self, name: str, scales: Tensor) -> Tensor:
        return scales.flip(0)


class TransposesBlocks(EditsScales):
    def edited(self, name: str, scales: Tensor) -> Tensor:
        return scales.T.reshape(scales.shape)


class KeepsFormerScales(EditsScales):
    """Uses the scales of the sync before."""

    def edited(self, name: str, scales: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("_kept", {})
        former, kept[name] = kept.get(name, scales), scales.clone()
        return former


class TakesScalesOfTheNextExpert(HFRollout):
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        return super().update_weights((self._taken(dict(bucket)) for bucket in buckets), version)

    def _taken(self, tensors: dict[str, Tensor]) -> Bucket:
        return [(name, tensors[self._source(name)]) for name in tensors]

    def _source(self, name: str) -> str:
        number = re.search(r"(?<=\.experts\.)\d+(?=\..*_scale_inv)", name)
        if number is None:
            return name
        return f"{name[: number.start()]}{(int(number[0]) + 1) % NUM_EXPERTS}{name[number.end() :]}"


class RepairsWhatIsNotFP8(HFRollout):
    """Quantises what comes in another dtype, waits for scales, and drops those of nothing."""

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> SyncReport:
        tensors = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        return super().update_weights([list(self._repaired(tensors))], version)

    def _repaired(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        assert self._policy.fp8 is not None
        for name in hf_views(self._model):
            tensor, scale_name = tensors[name], FP8Weights.scale_name(name)
            scales = tensors.get(scale_name)
            if name in self._policy.fp8.quantized and scales is None:
                tensor, scales = quantize_blocks(tensor.float(), torch.float32)
            yield name, tensor
            if name in self._policy.fp8.quantized:
                yield scale_name, scales.view(FP8Weights.scale_shape(tensor.shape))


class TestSwappedScales(Sabotaged, FP8Checks):
    engine = SwapsScales


class TestTransposedBlocks(Sabotaged, FP8Checks):
    engine = TransposesBlocks


class TestFormerScales(Sabotaged, FP8Checks):
    engine = KeepsFormerScales


class TestScalesOfExperts(Sabotaged, FP8Checks):
    engine = TakesScalesOfTheNextExpert


class TestRepaired(Sabotaged, FP8Checks):
    engine = RepairsWhatIsNotFP8
