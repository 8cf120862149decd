"""Worker extensions that the double is asked for by name."""

from __future__ import annotations

import on_double  # noqa: F401 - it makes the double importable
from tensorrt_llm.llmapi.rlhf_utils import WorkerExtension
from torch import Tensor


class Conflicting(WorkerExtension):
    """An extension that defines what workers have."""

    def sleep(self) -> None: ...


class Receiver(WorkerExtension):
    """An extension that gets weights by a way of its own."""

    def receive(self, weights: dict[str, Tensor], is_partial: bool) -> None:
        engine = self.engine.model_engine
        engine.model_loader.reload(engine.model, weights, allow_partial_loading=is_partial)
