"""The weights behind an engine, and whether a sync of them is open, complete or broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rlplug.weight_sync.hf_names import hf_views
from trtllm_double import wire
from trtllm_double.fp8 import SUFFIX, FP8Layers, dequantise


class Weights:
    """One copy of the model for all workers; each worker must bring the same weights.

    A sync is the buckets up to a finalisation. A name that comes a second time begins another sync: the former one
    broke off.

    Args:
        model: Its parameters are what a sync writes, each expert's by itself.
        fp8: Which of them come in FP8.
        world_size: Workers.
        check_free: Called when weights begin to change; raises RuntimeError while that may not be.
    """

    def __init__(self, model: nn.Module, fp8: FP8Layers, world_size: int, check_free: Callable[[], None]) -> None:
        self._parameters = hf_views(model)
        self._fp8 = fp8
        self._check_free = check_free
        self._received: list[list[dict[str, Tensor]]] = [[] for _ in range(world_size)]
        self._finalised: set[int] = set()
        self._arrived: set[str] = set()
        self._handles: set[bytes] = set()
        self.is_open = self.is_ready = False

    @torch.no_grad()
    def lose(self, mode: str) -> None:
        """Do to the weights what releasing them with this restore mode does."""
        values = {"NONE": float("nan"), "MEMSET": 0.0}
        if mode in values:
            self.is_ready = False
            for parameter in self._parameters.values():
                parameter.fill_(values[mode])

    def begin(self) -> None:
        """Open a sync, if none is open."""
        self._check_free()
        self.is_open, self.is_ready = True, False

    def load(self, rank: int, weights: Mapping[str, Tensor], used: set[bytes]) -> None:
        """Take what a worker got in one update. All of it is copied.

        Args:
            rank: The worker.
            weights: By name.
            used: The handles that they came by: kept until the finalisation.

        Raises:
            ValueError: A weight that does not fit. It is named, and the sync has to be made again.
            RuntimeError: Requests run, or the weights' memory is released.
        """
        self.begin()
        self._handles |= used
        self._received[rank].append({name: tensor.detach().clone() for name, tensor in weights.items()})
        if rank == 0:
            try:
                self._write(weights)
            except ValueError:
                self._arrived.clear()
                raise

    def _write(self, weights: Mapping[str, Tensor]) -> None:
        self._fp8.check(weights)
        for name, tensor in weights.items():
            if name not in self._fp8.shapes and not self._is_scale(name):
                self._check_plain(name, tensor)
            elif name in self._fp8.shapes and tensor.shape != self._fp8.shapes[name]:
                raise ValueError(f"{name}: shape {list(tensor.shape)}, and {list(self._fp8.shapes[name])} is needed")
        names = {name for name in weights if name in self._parameters}
        if names & self._arrived:
            self._arrived.clear()
        with torch.no_grad():
            for name in names:
                parameter, value = self._parameters[name], weights[name]
                if name in self._fp8.shapes:
                    value = dequantise(value, weights[f"{name}{SUFFIX}"], parameter.dtype)
                parameter.copy_(value)
        self._arrived |= names

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in self._fp8.shapes

    def _check_plain(self, name: str, tensor: Tensor) -> None:
        if name not in self._parameters:
            raise ValueError(f"{name}: the model has no such parameter (a tied weight comes under its first name)")
        parameter = self._parameters[name]
        if tensor.shape != parameter.shape:
            raise ValueError(f"{name}: shape {list(tensor.shape)}, and {list(parameter.shape)} is needed")
        if tensor.dtype != parameter.dtype:
            raise ValueError(f"{name}: {tensor.dtype}, and the engine calculates in {parameter.dtype}")

    def finalise(self, rank: int) -> None:
        """Note that a worker was told to finalise."""
        self._check_free()
        self._finalised.add(rank)

    def forget(self) -> None:
        """Drop what workers brought in a call that failed."""
        self._received = [[] for _ in self._received]
        self._finalised.clear()

    def settle(self) -> None:
        """Compare what the workers brought in one call, and end the sync when all of them were told to.

        Raises:
            RuntimeError: Workers got different weights, only some were told to finalise, or weights are missing.
        """
        received, finalised = self._received, self._finalised.copy()
        self.forget()
        for rank, other in enumerate(received):
            if not _same(received[0], other):
                self._arrived.clear()
                raise RuntimeError(f"worker {rank} got other weights than worker 0: each needs the full set")
        if finalised and len(finalised) < len(received):
            raise RuntimeError(f"only workers {sorted(finalised)} of {len(received)} were told to finalise")
        if finalised:
            self._end()

    def _end(self) -> None:
        missing = sorted(self._parameters.keys() - self._arrived)
        was_open, self.is_open = self.is_open, False
        self._arrived.clear()
        wire.drop(self._handles)
        self._handles.clear()
        if not was_open:
            raise RuntimeError("update_weights(None) without a bucket before it")
        if missing:
            raise RuntimeError(f"update_weights(None): {len(missing)} weights are missing, such as {missing[:4]}")
        self.is_ready = True


def _same(first: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    """Whether two workers got the same updates."""
    return len(first) == len(other) and all(
        one.keys() == two.keys() and all(wire.same_bits(one[name], two[name]) for name in one)
        for one, two in zip(first, other, strict=True)
    )
