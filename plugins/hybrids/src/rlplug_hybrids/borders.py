"""Hooks that keep the sequences of a packed row apart in layers with a state.

Such a layer gets a batch with one row per sequence, padded, and its outputs are packed again; or, where every kernel
that it calls takes the borders of sequences, it gets the borders.

Shape legend:
    N  tokens of all sequences
    S  sequences in the packed row
    T  tokens of the longest sequence
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from rlplug_hybrids.layers import block_of, codes_of, stateful_layers, takes_borders

BORDERS: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx")
"""Arguments that separate the sequences of a row; none applies to a padded batch."""


def keep_apart(network: nn.Module, use_kernels: bool = True) -> None:
    """Make the layers of ``network`` that have a state keep the sequences of packed rows apart.

    Rows without ``cu_seq_lens_q`` pass unchanged. It comes before whatever else wraps the blocks' forward methods, so
    that gradient checkpointing repeats what it does.

    Args:
        network: A model of transformers; a row is [1, N] token ids with ``cu_seq_lens_q`` and ``max_length_q``.
        use_kernels: Whether layers whose kernels take borders get them, in place of a padded batch.
    """
    blocks: dict[nn.Module, list[_Layer]] = {}
    for name, layer in stateful_layers(network).items():
        hooks, block = _Layer(layer, use_kernels), block_of(network, name)
        blocks.setdefault(block, []).append(hooks)
        layer.register_forward_pre_hook(hooks.before, with_kwargs=True)
        layer.register_forward_hook(hooks.after)
        block.register_forward_pre_hook(hooks.choose)
    for block, of_block in blocks.items():
        block.forward = _BlockForward(block.forward, of_block)


class _BlockForward:
    """Forward method of a block that tells its layers the borders of the row, since not all blocks pass them on.

    It wraps ``forward`` and not ``__call__``: transformers and rlplug recompute by wrapping ``forward`` again, and the
    borders of the row before would be stale.
    """

    def __init__(self, forward: Callable[..., Any], layers: list[_Layer]) -> None:
        self.forward, self.layers = forward, layers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            layer.of_block = {name: kwargs[name] for name in BORDERS if name in kwargs}
        return self.forward(*args, **kwargs)


class _Layer:
    """Hooks of one layer, and the borders of the row that its block is computing."""

    def __init__(self, layer: nn.Module, use_kernels: bool) -> None:
        self.layer, self.use_kernels = layer, use_kernels
        # transformers renames cu_seq_lens_q in delta nets; Kimi's read what nothing fills, cu_seqlens
        self.renames = any("cu_seq_lens_q" in code.co_consts for code in codes_of(type(layer)))
        self.of_block: dict[str, Any] = {}
        self.uses_kernels: bool | None = None
        """Whether the layer gets borders; asked at its first pass, since loading ends the use of kernels on a CPU"""
        self.packing: Tensor | None = None
        """int64 [N]: place of each token in the padded batch that the layer is computing"""
        self.shape: tuple[int, ...] = ()

    def choose(self, block: nn.Module, args: Any) -> None:
        """Choose before the block's forward method, in which CompileBlocks would trace how kernels are found."""
        if self.uses_kernels is None:
            self.uses_kernels = self.use_kernels and takes_borders(self.layer)

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        self.packing = None
        found = kwargs if kwargs.get("cu_seq_lens_q") is not None else self.of_block
        given = found.get("cu_seq_lens_q")
        if given is None:
            return None
        states = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim == 3)
        borders, tokens = given.to(torch.int64), torch.arange(states.shape[1], device=given.device)
        # of the borders and not of positions, which are 0 in the filling behind the last sequence too
        sequence = torch.searchsorted(borders, tokens, right=True) - 1
        kept = {name: value for name, value in kwargs.items() if name not in BORDERS}
        if self.uses_kernels:  # fla's rules read cu_seqlens; convolutions and Mamba 2 read seq_idx
            name = "cu_seq_lens_q" if self.renames else "cu_seqlens"
            return args, kept | {name: given, "seq_idx": sequence[None].to(torch.int32)}
        steps = torch.arange(found["max_length_q"], device=given.device)
        # padding repeats a sequence's last token: finite values, and nothing of its neighbours
        padding = torch.minimum(borders[:-1, None] + steps, borders[1:, None] - 1)
        self.packing, self.shape = sequence * len(steps) + tokens - borders[sequence], tuple(padding.shape)
        pad = _on_rows((1, len(tokens)), lambda row: row[0, padding])
        return tuple(pad(value) for value in args), {name: pad(value) for name, value in kept.items()}

    def after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        packing, self.packing = self.packing, None
        if packing is None:
            return None
        return _on_rows(self.shape, lambda batch: batch.flatten(0, 1)[packing][None])(output)


def _on_rows(shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Return a function that changes tensors [*shape, ...], and those in tuples, and leaves all else as it is."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(convert(part) for part in value)
        return change(value) if isinstance(value, Tensor) and tuple(value.shape[:2]) == shape else value

    return convert
