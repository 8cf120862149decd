"""Experts that an engine's routers chose: recorded, brought into one form, and checked before training reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlplug.errors import brief
from rlplug.interfaces.rollout import EngineFault
from rlplug.interfaces.router_replay import RouterShape, named_routers
from rlplug.types import NOT_RECORDED

Array = np.ndarray[Any, Any]


class RouterRecorder:
    """Records the experts of every forward pass of a model.

    Args:
        model: A model of transformers, whose routers have a known form.
    """

    def __init__(self, model: nn.Module) -> None:
        self._passes: list[list[Tensor]] = [[] for _ in named_routers(model)]
        for index, router in enumerate(named_routers(model).values()):
            router.register_forward_hook(self._hook(index))

    def take(self, num_rows: int) -> Tensor:
        """Return the experts of all forward passes since the last call, and forget them.

        Args:
            num_rows: Sequences in each of the passes.

        Returns:
            int16 [num_rows, T, L, k]: T tokens in all passes together.
        """
        layers = [torch.cat([part.view(num_rows, -1, part.shape[-1]) for part in parts], 1) for parts in self._passes]
        for parts in self._passes:
            parts.clear()
        return torch.stack(layers, dim=2)

    def _hook(self, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(router: nn.Module, inputs: Any, output: Any) -> None:
            self._passes[index].append(output[2].to(torch.int16))  # they stay on the device until the end of a batch

        return record


def check_routed_experts(source: str, experts: Any, num_tokens: int, routers: RouterShape) -> Array:
    """Check ``Completion.routed_experts``, and return them in the dtype of ``routers``.

    Args:
        source: Who returned them, for messages: the engine and the request.
        experts: What it returned.
        num_tokens: Tokens of prompt and completion.
        routers: Routers of the policy.

    Raises:
        EngineFault: They are no integers, have another shape, name an expert that the model lacks, or name one twice
            for a token in a layer; or a token has experts in some layers and in others not; or the last token has some.
    """
    if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu":
        what = f"dtype {experts.dtype}" if isinstance(experts, np.ndarray) else brief(experts)
        raise EngineFault(f"{source} returned routed experts of {what}, and not an array of integers.")
    shape = (num_tokens, len(routers.layers), routers.top_k)
    if experts.shape != shape:
        raise EngineFault(
            f"{source} returned routed experts of shape {list(experts.shape)}, and not {list(shape)}: tokens of prompt "
            "and completion, layers with a router, experts of a token."
        )
    wrong = (experts < NOT_RECORDED) | (experts >= routers.num_experts)
    if wrong.any():
        raise no_such_expert(source, int(experts[wrong][0]), routers)
    is_known = experts != NOT_RECORDED
    if (is_known.any(axis=(1, 2)) != is_known.all(axis=(1, 2))).any():
        token = int((is_known.any(axis=(1, 2)) != is_known.all(axis=(1, 2))).argmax())
        raise EngineFault(
            f"{source} returned routed experts of token {token} for some layers, and {NOT_RECORDED} for others."
        )
    twice = np.zeros(shape[:2], dtype=np.bool_)
    for first in range(routers.top_k):
        for second in range(first + 1, routers.top_k):
            twice |= (experts[..., first] == experts[..., second]) & is_known[..., first]
    if twice.any():
        token, layer = (int(index[0]) for index in twice.nonzero())
        raise EngineFault(
            f"{source} returned an expert twice for token {token} in layer {routers.layers[layer]}: "
            f"{experts[token, layer].tolist()}."
        )
    if num_tokens and is_known[-1].any():
        raise EngineFault(
            f"{source} returned routed experts of the last token, which no forward pass has read: they are those of "
            "another token."
        )
    return experts.astype(routers.dtype, copy=False)


def no_such_expert(source: str, expert: int, routers: RouterShape) -> EngineFault:
    """Return the fault of an engine that names an expert which the policy has not."""
    return EngineFault(
        f"{source} returned the expert {expert}, and the policy has experts from 0 to {routers.num_experts - 1}."
    )
