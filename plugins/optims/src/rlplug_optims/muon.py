"""Muon: orthogonalised momentum for the matrices of a model's blocks, AdamW for everything else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from rlplug.distributed.mesh import local_part, local_slices
from rlplug.errors import ConfigError

Group: TypeAlias = dict[str, Any]

QUINTIC: Final = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b and c of the Newton-Schulz iteration; Jordan chose them for the steepest slope at 0."""


class Muon(Optimizer):
    """Muon for the matrices inside blocks; AdamW for embeddings, output layer, norms and biases.

    A matrix ``W`` [A, B] with gradient ``G`` moves by its orthogonalised Nesterov momentum::

        M <- momentum M + (1 - momentum) G
        U  = (1 - momentum) G + momentum M
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(A, B)) NewtonSchulz(U)

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. The factor 0.2 sqrt(max(A, B)) is
    that of "Muon is Scalable for LLM Training", arXiv:2502.16982: updates have the size of AdamW's, so that its
    learning rate carries over. State: one number a weight where AdamW keeps two.

    The momentum of a sharded matrix is gathered, one matrix at a time, and every rank orthogonalises it for itself.

    Args:
        params: Pairs of name and parameter: names tell the matrices inside blocks (which have a number in the name, as
            in ``layers.3.mlp.up_proj.weight``) from embeddings and output layer.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        momentum: Momentum of Muon.
        num_steps: Newton-Schulz iterations.
        betas: Betas of AdamW.
        eps: Epsilon of AdamW.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        num_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        named = list(params)
        if not all(isinstance(item, tuple) for item in named):
            raise ConfigError("Muon needs named parameters, to tell matrices from embeddings: give named_parameters().")
        matrices = [(name, weight) for name, weight in named if is_block_matrix(name, weight)]
        rest = [(name, weight) for name, weight in named if not is_block_matrix(name, weight)]
        if not matrices:
            raise ConfigError(
                "Muon found no matrix inside a block, so AdamW would do all of it: use torch.optim.AdamW."
            )
        shared = {"lr": lr, "weight_decay": weight_decay}
        muon = {"params": matrices, "algorithm": "muon", "momentum": momentum, "num_steps": num_steps}
        groups = [muon, {"params": rest, "algorithm": "adamw", "betas": betas, "eps": eps}]
        super().__init__([group for group in groups if group["params"]], shared)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            (self._step_muon if group["algorithm"] == "muon" else self._step_adamw)(group, weights)
        return loss

    def _step_muon(self, group: Group, weights: list[Tensor]) -> None:
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            gradient, momentum = gradient_of(weight), state["momentum_buffer"]
            momentum.lerp_(gradient, 1 - group["momentum"])
            update = orthogonalized(whole(gradient.lerp(momentum, group["momentum"]).bfloat16()), group["num_steps"])
            local = local_part(weight)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update[local_slices(weight)], alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))

    def _step_adamw(self, group: Group, weights: list[Tensor]) -> None:
        for weight in weights:
            if not self.state[weight]:
                step = torch.zeros((), dtype=torch.float32)
                zeros = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                self.state[weight].update({"step": step, **zeros})
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            [gradient_of(weight) for weight in weights],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def is_block_matrix(name: str, weight: Tensor) -> bool:
    """Return whether a parameter is a matrix of a repeated block: its name then has a number in it."""
    return weight.ndim == 2 and re.search(r"(^|\.)\d+\.", name) is not None


def orthogonalized(matrix: Tensor, num_steps: int) -> Tensor:
    """Return bfloat16 [A, B] with the singular vectors of ``matrix``, and singular values between about 0.5 and 1.5.

    The Newton-Schulz iteration is ``X <- a X + (b X X^T + c (X X^T)^2) X``, from ``X`` with a Frobenius norm of 1.
    """
    a, b, c = QUINTIC
    x = matrix.bfloat16()
    x = x.T if matrix.shape[0] > matrix.shape[1] else x  # X X^T is then the smaller of both products
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, gathered, or a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_of(weight: Tensor) -> Tensor:
    """Return the gradient of a weight, which must have one."""
    assert weight.grad is not None
    return weight.grad
