"""One optimisation that changes the model, and one that does not."""

from __future__ import annotations

from torch import nn

from rlplug.interfaces import Effect, Optimization


class FreezeEmbeddings(Optimization):
    """Keeps the input embeddings as they are, and says how many values that is."""

    def before_shard(self, model: nn.Module) -> None:
        model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]

    def after_shard(self, model: nn.Module) -> None:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self._num_values = sum(parameter.numel() for parameter in frozen)

    def effects(self) -> list[Effect]:
        return [Effect(f"froze {self._num_values} values of the input embeddings")] if self._num_values else []


class NoEffect(Optimization):
    """Changes nothing, as an optimisation does on a model that it was not written for."""

    def effects(self) -> list[Effect]:
        return []
