"""The table of faults, and what the faulty engines share."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeVar

import torch
from capable_engines import CapableRollout
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from rlplug.interfaces import EngineCapabilities, Placement, PolicySpec
from rlplug.ops import scaled_logits, token_logprobs, truncate_logits
from rlplug.rollout.hf_engine import HFRollout
from rlplug.types import Completion, Request, SamplingParams

Engine = TypeVar("Engine", bound=type)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and who finds it."""

    engine: Any
    kind: str
    """Heading under which ``docs/conformance.md`` counts it."""
    caught_by: str | None
    """Check that must be the first to fail; ``None`` for a fault that the kit is known to miss."""

    says: str = ""
    """What the check's message must say, where its name does not name the cause."""

    @property
    def words(self) -> str:
        """First line of the engine's docstring, which says what is wrong."""
        return str(self.engine.__doc__).partition("\n")[0].rstrip(".")


FAULTS: Final[dict[str, Fault]] = {}


def fault(kind: str, caught_by: str | None, says: str = "") -> Callable[[Engine], Engine]:
    """Return a decorator that enters an engine in the table."""

    def enter(engine: Engine) -> Engine:
        assert engine.__name__ not in FAULTS
        assert engine.__doc__, engine
        FAULTS[engine.__name__] = Fault(engine, kind, caught_by, says)
        return engine

    return enter


class Plain(HFRollout):
    """HFRollout without what other files of tests sabotage: FP8 and the experts of its routers."""

    capabilities: EngineCapabilities = EngineCapabilities()


class Capable(CapableRollout):
    """An engine that sleeps and streams."""


class EditsLogits(Plain):
    """Draws from other logits than the model's."""

    edits: bool = True

    def edit(self, generated: Tensor, scores: Tensor) -> Tensor:
        """Return the logits, float [B, V], that follow the tokens generated so far, int64 [B, T]."""
        raise NotImplementedError

    def start(self, policy: PolicySpec, placement: Placement) -> None:
        super().start(policy, placement)
        original, engine = self._model.generate, self

        def generate(prompt_ids: Tensor, logits_processor: LogitsProcessorList, **options: Any) -> Any:
            class Edit(LogitsProcessor):
                def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
                    return engine.edit(input_ids[:, prompt_ids.shape[1] :], scores) if engine.edits else scores

            *first, sampler = logits_processor
            return original(prompt_ids, logits_processor=LogitsProcessorList([*first, Edit(), sampler]), **options)

        self._model.generate = generate


class DrawsOthers(EditsLogits):
    """Likewise, with the logprobs that the drawn tokens should have had: only the tokens give it away."""

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        self.edits = not sampling.is_truncated
        completions = super().generate(requests, sampling)
        if sampling.is_truncated or sampling.max_new_tokens == 1:
            return completions
        return [true_logprobs(self._model, r, c, sampling) for r, c in zip(requests, completions, strict=True)]


@torch.no_grad()
def true_logprobs(model: Any, request: Request, completion: Completion, sampling: SamplingParams) -> Completion:
    """Return a completion with the logprobs that its tokens have under the model."""
    logits = model(torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[
        0, len(request.prompt_ids) - 1 : -1
    ]
    tokens = torch.tensor(completion.token_ids.tolist(), dtype=torch.int64)
    scaled = truncate_logits(scaled_logits(logits, sampling.temperature), sampling)
    return dataclasses.replace(completion, logprobs=token_logprobs(scaled, tokens).numpy())


class EditsCompletions(Plain):
    """Returns its completions changed."""

    def edited(self, request: Request, completion: Completion, sampling: SamplingParams) -> Completion:
        raise NotImplementedError

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        completions = super().generate(requests, sampling)
        return [self.edited(r, c, sampling) for r, c in zip(requests, completions, strict=True)]


class EditsPrompts(Plain):
    """Continues other prompts than those it is given."""

    smallest: ClassVar[int] = 1

    def edited(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        raise NotImplementedError

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        changed = [dataclasses.replace(r, prompt_ids=self.edited(r.prompt_ids)) for r in requests]
        return super().generate(changed, sampling)


def remember_process() -> Callable[[], None]:
    """Return a function that puts back what the faults of this table change in the process."""
    dtype, threads, handler, folder = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        signal.getsignal(signal.SIGTERM),
        os.getcwd(),
    )
    variables, paths, level, filters = (
        dict(os.environ),
        list(sys.path),
        logging.getLogger().level,
        list(warnings.filters),
    )
    precision = torch.get_float32_matmul_precision()

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)
        signal.signal(signal.SIGTERM, handler)
        os.chdir(folder)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        sys.path[:], warnings.filters[:] = paths, filters  # type: ignore[index]
        gc.enable()
        socket.setdefaulttimeout(None)
        logging.getLogger().setLevel(level)

    return restore
