"""Mixtures of experts for TorchTitan: experts in the dtype of the run, and routers whose choice can be given."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rlplug.interfaces import NOT_RECORDED, replace_choice
from rlplug_trainer_titan.library import titan


def use_own_parts(mixture: Any) -> None:
    """Exchange the experts and the router in TorchTitan's configuration of a mixture, and leave out its expert bias."""
    mixture.router = _with_class(_router_class(), mixture.router)
    mixture.routed_experts.inner_experts = _with_class(_experts_class(), mixture.routed_experts.inner_experts)
    mixture.load_balance_coeff = None  # no checkpoint has the bias that it would train


def _with_class(module_class: Any, config: Any) -> Any:
    """Return a configuration with the same values that builds ``module_class``."""
    return module_class.Config(**{field.name: getattr(config, field.name) for field in fields(config)})


@cache
def _experts_class() -> Any:
    base: Any = titan("models.common.moe").GroupedExperts

    class Experts(base):  # type: ignore[misc]  # its base class is imported at run time
        """Experts that compute in the dtype of their input; TorchTitan's cast everything to bf16."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc]
            """No options of its own."""

        def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # noqa: N803 - TorchTitan's names
            """Return [R, D] of tokens [R, D] that are sorted by expert, with the number of tokens of each, [E]."""
            if x_RD.dtype == torch.bfloat16:
                output: Tensor = super().forward(x_RD, num_tokens_per_expert_E)
                return output
            gate, down, up = (_local(weight).transpose(-2, -1) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
            ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
            hidden = torch.nn.functional.silu(self._grouped_mm(A=x_RD, B_t=gate, offs=ends))
            hidden = hidden * self._grouped_mm(A=x_RD, B_t=up, offs=ends)
            mixed: Tensor = self._grouped_mm(A=hidden, B_t=down, offs=ends)
            return mixed

    return Experts


@cache
def _router_class() -> Any:
    base: Any = titan("models.common.moe").TokenChoiceTopKRouter

    class Router(base):  # type: ignore[misc]  # its base class is imported at run time
        """Router of Qwen3's mixtures, as in transformers and engines: logits in the run's dtype, softmax in float32.

        TorchTitan's computes logits in float32 on GPUs alone, by autocast, and would choose other experts there.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc]
            """No options of its own."""

        routed_experts: Tensor | None = None
        """Experts of the tokens of the next passes, int [n, K]: see :class:`rlplug.interfaces.RouterReplay`."""
        num_differing: Tensor | None = None

        def forward(self, x_BLD: Tensor, expert_bias_E: None = None) -> tuple[Tensor, Tensor, Tensor]:  # noqa: N803
            """Return scores float32 [1, n, K] and numbers int64 [1, n, K] of the experts, and all scores [1, n, E]."""
            scores = torch.softmax(self.gate(x_BLD), dim=-1, dtype=torch.float32)
            chosen = torch.topk(scores, k=self.top_k, dim=-1).indices
            if self.routed_experts is not None:
                chosen = _replayed(self, chosen)
            of_chosen = scores.gather(dim=-1, index=chosen)
            if self.route_norm:
                of_chosen = of_chosen / of_chosen.sum(dim=-1, keepdim=True)
            return of_chosen, chosen, scores

    return Router


def _local(weight: Any) -> Tensor:
    local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local


def _replayed(router: Any, own: Any) -> Any:
    """Return the experts that ``router`` must use, [1, N, K], and count its own choices that they replace.

    With tensor parallelism each rank has a part of the row: it takes that part of the engine's experts, and the count
    is that of the whole row.
    """
    given: Any = torch.nn.functional.pad(
        router.routed_experts, (0, 0, 0, own.shape[1] - len(router.routed_experts)), value=NOT_RECORDED
    )[None]
    if not isinstance(own, DTensor):
        experts, differs = replace_choice(own, given)
        router.num_differing.copy_(differs.sum())
        return experts
    mesh, placements = own.device_mesh, own.placements
    given = distribute_tensor(given, mesh, placements, src_data_rank=None).to_local()
    experts, differs = replace_choice(own.to_local(), given)
    count = differs.sum()
    dist.all_reduce(count, group=mesh.get_group())
    router.num_differing.copy_(count)
    return DTensor.from_local(experts, mesh, placements, shape=own.shape, stride=own.stride())
