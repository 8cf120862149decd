"""Configuration of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rlplug.errors import ConfigError
from rlplug.types.ranges import Positive, Range, Seed, check_ranges


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters, ``model.lora``: W + alpha / rank * B A for each matrix W; B and A train, W does not.

    There is no dropout: a pass with dropout computes other logprobs than the engine sampled with.

    Args:
        rank: Rank r of the adapters.
        alpha: Their updates are scaled by alpha / rank.
        targets: ``all-linear``, for all linear layers but the output layer and routers of experts, or the last parts of
            their names, such as ``[q_proj, v_proj]``.
        path: Folder of an adapter to start from, as peft and this trainer's export write it; its rank, alpha and
            targets must be the ones above. By default B starts at zero, so that the policy starts as it is.
        seed: Seed of A; 0 follows ``seed_everything``.
        sync: What a weight sync sends: ``merged``, whole weights with the adapters added, which every engine takes, or
            ``adapters``, the adapters alone, to an engine that serves them beside the frozen weights, which it gets
            once.
    """

    rank: Annotated[int, Range(1, 100_000)] = 16
    alpha: Positive = 32.0
    targets: str | list[str] = "all-linear"
    path: str | None = None
    seed: Seed = 0
    sync: Literal["merged", "adapters"] = "merged"

    def __post_init__(self) -> None:
        check_ranges(self, "model.lora")
        if self.targets != "all-linear" and isinstance(self.targets, str):
            raise ConfigError(f"model.lora.targets is {self.targets!r}: give all-linear, or a list of layers' names.")
        if not self.targets:
            raise ConfigError("model.lora.targets is empty: name layers, or give all-linear.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
