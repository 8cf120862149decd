"""Routers of transformers' mixtures of experts: checked for their form, and hooked to replay experts.

They return router logits [n, E], scores [n, k] and experts [n, k]: the form of Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V3
and most others in transformers. How scores follow from logits is found by trying :data:`SCORES` on a copy with random
weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlplug.errors import ConfigError
from rlplug.interfaces.router_replay import RouterReplay, RouterShape, named_routers, replayed
from rlplug.types import NOT_RECORDED

ScoreFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Scores [n, k] of chosen experts [n, k] from float32 router logits [n, E]."""

NUM_PROBES: Final = 64
"""Random tokens on which a router's scores are compared with each of ``SCORES``."""
LAYER: Final = re.compile(r"\.(\d+)\.")


def softmax_of_all(logits: Tensor, experts: Tensor) -> Tensor:
    """Softmax over all experts, not normalised over the chosen ones: OLMoE, Qwen3-MoE without ``norm_topk_prob``."""
    return logits.softmax(dim=-1).gather(-1, experts)


def softmax_of_chosen(logits: Tensor, experts: Tensor) -> Tensor:
    """Softmax over the chosen experts, or over all and then normalised: Qwen3-MoE, Mixtral, gpt-oss, Granite."""
    return logits.gather(-1, experts).softmax(dim=-1)


def sigmoid_of_chosen(logits: Tensor, experts: Tensor) -> Tensor:
    """Sigmoid of the chosen experts' logits, not normalised."""
    return logits.gather(-1, experts).sigmoid()


def normalised_sigmoid(logits: Tensor, experts: Tensor) -> Tensor:
    """Sigmoid of the chosen experts' logits, normalised: DeepSeek-V3, GLM-4-MoE with ``norm_topk_prob``."""
    scores = logits.gather(-1, experts).sigmoid()
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


SCORES: Final[Sequence[ScoreFunction]] = (softmax_of_chosen, softmax_of_all, normalised_sigmoid, sigmoid_of_chosen)


def router_shape(model: nn.Module, key: str) -> RouterShape:
    """Return the shape of a model's routers, also on the meta device; ``key`` is of the option that needs them.

    Raises:
        ConfigError: The model has no experts, or its routers have another form.
    """
    name, routers = type(model).__name__, named_routers(model)
    num_blocks = sum(path.rpartition(".")[2] == "experts" for path, _ in model.named_modules())
    if not num_blocks:
        raise ConfigError(f"{key} is true, and {name} is no mixture of experts: remove it.")
    shapes = {(int(router.num_experts), int(router.top_k)) for router in routers.values()}  # type: ignore[arg-type]
    layers = tuple(int(found[1]) for found in map(LAYER.search, routers) if found is not None)
    if (
        len(routers) != num_blocks
        or len(shapes) != 1
        or sorted(set(layers)) != list(layers)
        or len(layers) != num_blocks
    ):
        raise ConfigError(
            f"{key} is true, and the routers of {name} have another form than those that it knows: modules with "
            f"top_k, num_experts and weight, one for each of its {num_blocks} layers with experts, and all alike. "
            "Remove it."
        )
    ((num_experts, top_k),) = shapes
    return RouterShape(layers, num_experts, top_k)


def replay_routers(model: nn.Module, key: str) -> RouterReplay:
    """Hook the routers of a model, which may be on the meta device, so that they replay experts.

    Raises:
        ConfigError: The model has no routers of a known form.
    """
    router_shape(model, key)
    routers = list(named_routers(model).values())
    for router in routers:
        vars(router)["score_experts"] = score_function(router, type(model).__name__, key)
        router.register_forward_hook(_replay)
    return RouterReplay(routers)


def score_function(router: nn.Module, name: str, key: str) -> ScoreFunction:
    """Return the function by which a router's scores follow from its logits, found on random weights and tokens.

    Raises:
        ConfigError: None of ``SCORES`` gives the router's scores.
    """
    probe: Any = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*probe.parameters(), *probe.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
        hidden = torch.randn(NUM_PROBES, probe.weight.shape[1], generator=generator)
        output = _output(probe, hidden)
        if _has_known_form(output, probe):
            logits, scores, experts = output
            for scale in {1.0, float(getattr(router, "routed_scaling_factor", 1.0))}:
                for function in SCORES:
                    if torch.allclose(scale * function(logits.float(), experts), scores.float(), rtol=1e-5, atol=1e-7):
                        return _scaled(function, scale)
    raise ConfigError(
        f"{key} is true, and {type(router).__name__} of {name} computes its scores in a way that it does not know: "
        "remove it. It knows softmax and sigmoid of router logits, normalised over the chosen experts or not."
    )


def _output(router: Any, hidden: Tensor) -> Any:
    """Return what a router makes of hidden states alone, or ``None`` where it needs more."""
    try:
        return router(hidden)
    except TypeError:
        return None


def _scaled(function: ScoreFunction, scale: float) -> ScoreFunction:
    return function if scale == 1.0 else lambda logits, experts: scale * function(logits, experts)


def _has_known_form(output: Any, router: Any) -> bool:
    """Whether a router returned logits [n, E], scores [n, k] and experts [n, k]."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(part, Tensor) for part in output)):
        return False
    shapes = [(NUM_PROBES, router.num_experts), (NUM_PROBES, router.top_k), (NUM_PROBES, router.top_k)]
    return [tuple(part.shape) for part in output] == shapes and output[2].dtype == torch.int64


def _replay(router: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
    """Forward hook of a router: exchange its choice for the engine's, and score that with its own logits."""
    if router.routed_experts is None:
        return None
    logits, scores, own = output
    experts, differs = replayed(router, own)
    score: Any = router.score_experts
    return logits, torch.where(differs, score(logits.float(), experts).to(scores.dtype), scores), experts


def experts_of_row(experts: NDArray[Any], size: int) -> Tensor:
    """Return the experts of a row of ``size`` tokens, [N, L, k]; -1 in the filling at its end."""
    filling = np.full((size - len(experts), *experts.shape[1:]), NOT_RECORDED, dtype=experts.dtype)
    return torch.from_numpy(np.concatenate([experts, filling]))
