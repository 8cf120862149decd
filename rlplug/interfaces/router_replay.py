"""Router replay: the trainer's routers take the experts that the engine's routers chose (R3, arXiv 2510.11370).

Shape legend, besides that of ``types.py``:
    n  tokens of a packed row that this rank computes
    L  decoder layers with a router
    k  experts of a token in one layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlplug.types import NOT_RECORDED


@dataclass(frozen=True)
class RouterShape:
    """Routers of a mixture of experts: which layers have one, and what each chooses from.

    Attributes:
        layers: Indices of the decoder layers that have a router, ascending; L of them.
        top_k: Experts of a token in one layer, k.
    """

    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype in which expert ids and ``NOT_RECORDED`` are kept: int8, or int16 from 129 experts on."""
        return np.dtype(np.int8 if self.num_experts <= 128 else np.int16)

    def empty(self, num_tokens: int) -> np.ndarray[Any, Any]:
        """Return ``NOT_RECORDED`` for each of ``num_tokens`` tokens, [num_tokens, L, k]."""
        return np.full((num_tokens, len(self.layers), self.top_k), NOT_RECORDED, dtype=self.dtype)


def named_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model in layer order, by name.

    A router is a module with ``top_k``, ``num_experts`` and a ``weight`` of one row per expert, as in transformers.
    """
    return {name: module for name, module in model.named_modules() if _looks_like_router(module)}


class RouterReplay:
    """The routers of one network, and the experts that they take in its forward passes.

    A trainer makes it in :meth:`ModelTrainer.router_replay <rlplug.interfaces.ModelTrainer.router_replay>`, and hooks
    each router so that it chooses by :func:`replayed`. The core calls :meth:`set` before each forward pass.

    Args:
        routers: The routers, by ascending layer.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self.routers = list(routers)
        for router in self.routers:
            vars(router)["routed_experts"] = None  # plain attributes: neither buffers nor a part of the state dict
            vars(router)["num_differing"] = None

    def set(self, routed_experts: Tensor | None) -> None:
        """Set the experts of the next forward pass, and of what its backward pass recomputes.

        Args:
            routed_experts: int8 or int16 [n, L, k], on the device; ``None`` lets the routers decide.
        """
        if routed_experts is None:
            for router in self.routers:
                vars(router)["routed_experts"] = None
            return
        assert routed_experts.shape[1] == len(self.routers), routed_experts.shape
        for router, experts in zip(self.routers, routed_experts.unbind(dim=1), strict=True):
            vars(router)["routed_experts"] = experts.contiguous()
            vars(router)["num_differing"] = torch.zeros((), dtype=torch.int64, device=experts.device)

    def num_differing(self) -> Tensor:
        """Return in how many (token, layer) pairs of the newest forward pass the routers' own choice is another.

        Returns:
            int64 [], on the device, among the pairs that :meth:`set` gave experts for.
        """
        counts: list[Tensor] = [vars(router)["num_differing"] for router in self.routers]
        return torch.stack(counts).sum()


def replayed(router: nn.Module, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts that a router must use, and where they are not its own choice.

    ``router.num_differing`` is overwritten rather than added to, so recomputing a block does not count twice.

    Args:
        router: A router of a :class:`RouterReplay` whose ``routed_experts`` are set.
        own: int64 [n, k]: experts that it chose itself.

    Returns:
        int64 [n, k], and bool [n, 1]: whether the engine's choice took the place of the router's own.
    """
    replayer: Any = router
    experts, differs = replace_choice(own, replayer.routed_experts)
    replayer.num_differing.copy_(differs.sum())
    return experts, differs


def replace_choice(own: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the engine's experts where they are not a router's own choice, and where that is.

    Where the engine chose the same set of experts, or did not return its choice, the result is ``own``, in its order.

    Args:
        own: int64 [..., k]: experts that the router chose itself.
        given: Integers [..., k]: those of the engine, or ``NOT_RECORDED``.

    Returns:
        int64 [..., k], and bool [..., 1].
    """
    given = given.to(own.dtype)
    is_same = (given.sort(dim=-1).values == own.sort(dim=-1).values).all(dim=-1, keepdim=True)
    differs = (given[..., :1] != NOT_RECORDED) & ~is_same
    return torch.where(differs, given, own), differs


def _looks_like_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    num_experts, top_k = getattr(module, "num_experts", None), getattr(module, "top_k", None)
    return isinstance(top_k, int) and weight is not None and weight.dim() == 2 and weight.shape[0] == num_experts
