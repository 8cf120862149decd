"""Host memory for the tensors that autograd saves, copied out and back while the GPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass
class _Storage:
    """Storage that autograd saved views of: on the device at first, then on the host, and on the device again."""

    on_device: Tensor | None
    """uint8 [bytes]; ``None`` while only the host has it"""
    on_host: Tensor | None = None
    """uint8 [bytes], pinned where there is a GPU; ``None`` before it is copied"""


@dataclass
class _Block:
    """Tensors that autograd saved in one forward pass of a block."""

    device: torch.device
    before: _Block | None
    """The block that ran before this one; its backward pass runs after."""
    storages: WeakValueDictionary[int, _Storage] = field(default_factory=WeakValueDictionary)
    """Saved storages, by their address in the forward pass. Only the views keep them alive, so that the backward pass
    frees them one by one."""
    copied: torch.Event | None = None
    """CUDA event that the newest copies record at their end."""
    is_released: bool = False
    """Whether the device memory of its storages was given up."""
    is_used: bool = False
    """Whether its backward pass has begun."""


@dataclass(frozen=True)
class _View:
    """Saved tensor, as a view of its storage; ``size``, ``stride`` and ``offset`` count elements of ``dtype``."""

    block: _Block
    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostStash:
    """Moves the tensors that blocks save to host memory and back, block by block, on a CUDA stream of its own.

    A storage moves once, however many saved tensors are views of it. When a block has run forward, its storages are
    copied out, and the device memory is released when the next block has run: the device holds two blocks' activations
    at a time. Those of the last block stay, as its backward pass comes next. In the backward pass, the first saved
    tensor that a block reads starts the copies of the block before it. On a CPU the copies are synchronous.

    Args:
        min_bytes: Size of the smallest storage to move, in bytes.
    """

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.bytes_moved = 0
        """Bytes copied to the host so far."""
        self._stream: torch.cuda.Stream | None = None
        self._newest: _Block | None = None

    @contextmanager
    def block(self, inputs: Any, stays: Any, is_last: bool) -> Iterator[None]:
        """Move the tensors that autograd saves inside the context, which is one block's forward pass.

        Args:
            inputs: The block's inputs; any container with tensors in it.
            stays: Tensors that are not moved, in any container.
            is_last: Whether this is the last block of the pass.
        """
        kept = {_address(leaf) for leaf in tree_leaves(stays) if isinstance(leaf, Tensor)}
        device = next(leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        block = _Block(device, self._newest)

        def pack(tensor: Tensor) -> Tensor | _View:
            address = _address(tensor)
            is_small = tensor.untyped_storage().nbytes() < self.min_bytes
            if address in kept or is_small or tensor.device != device:
                return tensor
            storage = block.storages.get(address) or _Storage(_view(tensor, torch.uint8))
            block.storages[address] = storage
            return _View(block, storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        if not is_last:
            self._copy_out(block)
        if block.before is not None:
            self._release(block.before)
        self._newest = None if is_last else block

    def _copy_out(self, block: _Block) -> None:
        with self._copying(block):
            for storage in block.storages.values():
                assert storage.on_device is not None
                pinned = storage.on_device.is_cuda
                storage.on_host = torch.empty_like(storage.on_device, device="cpu", pin_memory=pinned)
                storage.on_host.copy_(storage.on_device, non_blocking=True)
                self.bytes_moved += storage.on_host.numel()

    def _release(self, block: _Block) -> None:
        """Release a block's device memory, once its copies are done; the next computation may overwrite it."""
        _wait(block)
        block.is_released = True
        for storage in block.storages.values():
            storage.on_device = None

    def _copy_back(self, block: _Block) -> None:
        if not block.is_released:
            return
        block.is_released = False
        storages = list(block.storages.values())
        for storage in storages:  # allocated on the compute stream, where they are used and freed
            assert storage.on_host is not None
            storage.on_device = torch.empty_like(storage.on_host, device=block.device, pin_memory=False)
        with self._copying(block):
            for storage in storages:
                assert storage.on_host is not None
                assert storage.on_device is not None
                storage.on_device.copy_(storage.on_host, non_blocking=True)

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        block = saved.block
        if not block.is_used:
            block.is_used = True
            self._copy_back(block)
            _wait(block)
            if block.before is not None:
                self._copy_back(block.before)
        assert saved.storage.on_device is not None
        return _view(saved.storage.on_device, saved.dtype, saved.offset, saved.size, saved.stride)

    @contextmanager
    def _copying(self, block: _Block) -> Iterator[None]:
        """Run copies on the copy stream, after all work that the compute stream has been given so far."""
        if block.device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(block.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(block.device))
        with torch.cuda.stream(self._stream):
            yield
        block.copied = self._stream.record_event()


def _wait(block: _Block) -> None:
    """Make the compute stream wait for the block's copies."""
    if isinstance(block.copied, torch.cuda.Event):
        torch.cuda.current_stream(block.device).wait_event(block.copied)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(
    tensor: Tensor,
    dtype: torch.dtype,
    offset: int = 0,
    size: torch.Size | None = None,
    stride: tuple[int, ...] | None = None,
) -> Tensor:
    """Return a view of the tensor's storage; by default all of it, one-dimensional."""
    storage = tensor.untyped_storage()
    size = torch.Size([storage.nbytes() // dtype.itemsize]) if size is None else size
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(storage, offset, size, (1,) if stride is None else stride)
