"""``SamplingParams`` and what is drawn with it: the contract's ``SamplingParams``, its defaults and traps."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final

import numpy
import numpy.typing

from trtllm_double.contract import SAMPLING

Array = numpy.typing.NDArray[numpy.float64]


class LogprobMode(enum.StrEnum):
    """Of ``tensorrt_llm/sampling_params.py``. Processed is after temperature, top-k and top-p, renormalised."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Of ``tensorrt_llm/executor/result.py``: ``rank`` 1 is the likeliest token."""

    logprob: float
    rank: int | None = None


_UNSAID_DEFAULTS: Final = {
    "include_stop_str_in_output": False,
    "logprobs_mode": LogprobMode.RAW,
    "logprobs_simple_format": False,
    "ignore_eos": False,
    "return_perf_metrics": False,
}
"""Defaults of ``tensorrt_llm/sampling_params.py`` that the contract does not list; all others are ``None``."""


def _check(self: Any) -> None:
    """Do what ``SamplingParams._validate`` does, and the contract's ``traps``."""
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
    if self.n != 1:
        raise ValueError(f"greedy decoding does not allow multiple returns, and the double none, got n={self.n}")
    if self.seed is not None and not 0 <= self.seed < 1 << 64:
        raise ValueError(f"require 0 <= seed < 2**64, got seed={self.seed}")
    self.logprobs_mode = LogprobMode(self.logprobs_mode)
    if self.logprobs is not None and self.logprobs < 0:
        raise ValueError(f"require logprobs >= 0, got logprobs={self.logprobs}")
    if self.logprobs_simple_format and self.logprobs != 0:
        raise ValueError(f"logprobs_simple_format requires logprobs == 0, got logprobs={self.logprobs}")


def _fields() -> list[tuple[str, Any, Any]]:
    defaults = dict.fromkeys(SAMPLING["fields"]) | _UNSAID_DEFAULTS | SAMPLING["defaults"]
    return [(name, Any, dataclasses.field(default=defaults[name])) for name in SAMPLING["fields"]]


SamplingParams = dataclasses.make_dataclass(
    "SamplingParams", _fields(), kw_only=True, namespace={"__post_init__": _check}
)


def is_greedy(params: Any) -> bool:
    """Contract ``traps``: all three unset is greedy. The rest is ``params_imply_greedy_decoding`` of the sources."""
    unset = params.temperature is None and params.top_p is None and params.top_k is None
    return unset or params.temperature == 0 or params.top_k == 1 or params.top_p == 0


def probabilities(logits: Array, params: Any) -> Array:
    """Return what is drawn from, float64 [V]: temperature, then top-k, then top-p. Greedy is 1 at one token."""
    if is_greedy(params):
        return numpy.eye(1, len(logits), int(logits.argmax()))[0]
    scaled = logits / (1.0 if params.temperature is None else params.temperature)
    order = numpy.argsort(-scaled, kind="stable")
    kept = numpy.exp(scaled[order] - scaled.max())
    if params.top_k:
        kept[params.top_k :] = 0.0
    kept /= kept.sum()
    if params.top_p is not None:
        kept[numpy.cumsum(kept) - kept >= params.top_p] = 0.0
        kept /= kept.sum()
    result = numpy.empty_like(kept)
    result[order] = kept
    return result


def logprobs_of(logits: Array, drawn_from: Array, params: Any) -> Array:
    """Return the logprobs that are reported, [V]: of the logits when RAW. Greedy and PROCESSED is 0 for its token."""
    if params.logprobs_mode == LogprobMode.RAW:
        shifted = logits - logits.max()
        return shifted - numpy.log(numpy.exp(shifted).sum())
    with numpy.errstate(divide="ignore"):
        return numpy.log(drawn_from)


def report(logprobs: Array, token: int, params: Any) -> float | dict[int, Logprob]:
    """Return a token's entry in ``logprobs``: contract ``traps``. The likeliest is first, the sampled maybe last."""
    if params.logprobs_simple_format:
        return float(logprobs[token])
    top = numpy.argsort(-logprobs, kind="stable")[: params.logprobs].tolist()
    listed = top if token in top else [*top, token]
    return {index: Logprob(float(logprobs[index]), int((logprobs > logprobs[index]).sum()) + 1) for index in listed}
