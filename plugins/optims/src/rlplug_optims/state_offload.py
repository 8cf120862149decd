"""The trainer's state waits in pinned host memory while the engine generates.

An offloaded tensor keeps its identity: only its storage is emptied, and filled again later. Objects that refer to it,
such as FSDP's padded shards behind the parameters and the optimizer's state, are not affected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from rlplug.distributed.offload import Offload, OffloadMode
from rlplug.types import GIB

CHUNK_BYTES: Final = 1 << 26
"""Size of one pinned allocation, in bytes: a power of two."""


class HostMemory:
    """Host memory, pinned for a GPU, that is allocated once and kept.

    It is allocated in chunks whose size is a power of two, because torch rounds every pinned allocation up to one.
    """

    def __init__(self, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned = pinned
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    def pieces(self, start: int, num_bytes: int) -> Iterator[Tensor]:
        """Yield uint8 views that together cover ``num_bytes`` from ``start`` on, allocating chunks as needed."""
        while num_bytes:
            index, offset = divmod(start, self._chunk_bytes)
            while len(self._chunks) <= index:
                self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._pinned))
            piece = self._chunks[index][offset : offset + num_bytes]
            yield piece
            start, num_bytes = start + len(piece), num_bytes - len(piece)


class OffloadedTensors:
    """Tensors that are offloaded together and restored together.

    Args:
        find: Returns the tensors, in lists and dicts of any depth. Called at each offload, because an optimizer has no
            state before its first step.
        device: Device of the tensors. Tensors on other devices are left alone.
        is_frozen: Whether their values never change, so that they are copied to the host only once.
        chunk_bytes: Chunk size of the host memory, in bytes; see :class:`HostMemory`.
    """

    def __init__(
        self, find: Callable[[], Any], device: torch.device, is_frozen: bool = False, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._find = find
        self._device = device
        self._is_frozen = is_frozen
        self._host = HostMemory(pinned=device.type == "cuda", chunk_bytes=chunk_bytes)
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        """Storages whose values are on the host, each with its size on the device in bytes."""
        self.is_offloaded = False
        self._is_restoring = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are off the device now."""
        return sum(size for _, size in self._storages) if self.is_offloaded else 0

    def offload(self) -> None:
        """Copy the tensors to the host and free their device memory; do nothing when they are offloaded already."""
        self.finish_restore()
        if self.is_offloaded:
            return
        if not (self._is_frozen and self._storages):
            self._storages = distinct_storages(self._find(), self._device)
            self._copy(to_host=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # every stream that reads them has finished
        for storage, _ in self._storages:
            storage.resize_(0)
        self.is_offloaded = True

    def start_restore(self) -> None:
        """Start to copy the tensors back; they must not be used before :meth:`finish_restore`."""
        if not self.is_offloaded:
            return
        for storage, size in self._storages:
            storage.resize_(size)
        self._copy(to_host=False)
        self.is_offloaded, self._is_restoring = False, True

    def finish_restore(self) -> None:
        """Wait for the copies that :meth:`start_restore` started."""
        if not self._is_restoring:
            return
        if self._stream is not None:
            self._stream.synchronize()
        if not self._is_frozen:
            self._storages = []  # a tensor that was dropped meanwhile frees its memory
        self._is_restoring = False

    def _copy(self, to_host: bool) -> None:
        if self._stream is None:
            self._copy_bytes(to_host)
            return
        # device memory that is allocated anew may still be in use by work that was queued before
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy_bytes(to_host)

    def _copy_bytes(self, to_host: bool) -> None:
        start = 0
        for storage, size in self._storages:
            on_device = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            offset = 0
            for on_host in self._host.pieces(start, size):
                part = on_device[offset : offset + len(on_host)]
                target, source = (on_host, part) if to_host else (part, on_host)
                target.copy_(source, non_blocking=True)
                offset += len(on_host)
            start += size


class StateOffload(Offload):
    """What ``memory.offload`` asks for.

    The optimizers' state is offloaded from before the engine wakes until the first optimizer step, and copying it back
    overlaps with the forward and backward passes before that step. Weights are offloaded once the engine has them, and
    restored when it has generated. The reference policy is on the device only for its own forward-only pass.

    Args:
        mode: The state to offload, not ``none``.
        device: The trainer's device.
        trained: Sharded networks that are trained.
        reference: Sharded networks that are frozen.
        optimizers: Optimizers of ``trained``; empty in a validation.
    """

    def __init__(
        self,
        mode: OffloadMode,
        device: torch.device,
        trained: Sequence[nn.Module],
        reference: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._device = device
        if mode != "optimizer_and_weights":
            trained = reference = []
        self._optimizers = OffloadedTensors(
            lambda: [list(optimizer.state.values()) for optimizer in optimizers], device
        )
        self._weights = OffloadedTensors(lambda: _shards(trained), device)
        self._reference = OffloadedTensors(lambda: _shards(reference), device, is_frozen=True)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._timed(self._optimizers.finish_restore))
        self._seconds = 0.0
        self._largest = 0

    def before_engine_wakes(self) -> None:
        self._timed(self._reference.offload, self._optimizers.offload)
        self._release()

    def before_generation(self) -> None:
        self._timed(self._weights.offload)
        self._release()

    def after_generation(self) -> None:
        self._timed(self._weights.start_restore, self._weights.finish_restore)

    def before_update(self) -> None:
        self._timed(self._optimizers.start_restore)

    def after_step(self) -> None:
        self._timed(self._optimizers.start_restore, self._optimizers.finish_restore)

    @contextmanager
    def reference_on_device(self) -> Iterator[None]:
        self._timed(self._reference.start_restore, self._reference.finish_restore)
        yield
        self._timed(self._reference.offload)

    def pop_metrics(self) -> dict[str, float]:
        metrics = {"offload/seconds": self._seconds, "offload/gib": self._largest / GIB}
        self._seconds, self._largest = 0.0, 0
        return metrics

    def _release(self) -> None:
        """Return freed memory to the device, because an engine has an allocator of its own."""
        offloaded = (self._optimizers, self._weights, self._reference)
        self._largest = max(self._largest, sum(tensors.num_bytes for tensors in offloaded))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _timed(self, *actions: Callable[[], None]) -> None:
        """Run ``actions`` and count their seconds, in which the training loop waits."""
        began = time.perf_counter()
        for action in actions:
            action()
        self._seconds += time.perf_counter() - began


def distinct_storages(tree: Any, device: torch.device) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the distinct storages of the tensors of a tree that are on ``device``, with their sizes in bytes."""
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for leaf in tree_leaves(tree):
        for tensor in _plain_tensors(leaf):
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.nbytes():
                found[storage.data_ptr()] = (storage, storage.nbytes())
    return list(found.values())


def _shards(networks: Sequence[nn.Module]) -> list[nn.Parameter]:
    shards = [parameter for network in networks for parameter in network.parameters()]
    assert all(isinstance(shard, DTensor) for shard in shards), "a network is still gathered"
    return shards


def _plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside a DTensor or a quantised tensor, or a plain tensor itself."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:  # torch 2.13 names the mesh too
            yield from _plain_tensors(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
