"""The tokens of some completions of a step, and the bytes that hold them: tensors by safetensors, compressed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

Array = NDArray[Any]

PRODUCED: Final = 1
"""Bit of ``flags``: the policy produced the token. Others are observations of an environment."""
TRAINED: Final = 2
"""Bit of ``flags``: the token trained."""

ROW: Final = np.dtype([(name, np.int32) for name in ("group", "index", "prompt_tokens", "num_tokens")])
"""A completion: the place of its group among those of the step that train, from 0; its place in the group, from 0; the
tokens of its prompt; and its own tokens, observations included."""

COLUMNS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "token_ids": np.int32,
        "flags": np.uint8,
        "policy_versions": np.int32,
        "advantages": np.float32,
        "engine_logprobs": np.float16,
        "logprobs": np.float16,
        "sampled_logprobs": np.float16,
        "mismatch": np.float16,
        "log_ratio": np.float16,
        "ref_log_ratio": np.float16,
        "entropy": np.float16,
        "clipped": np.int8,
        "values": np.float32,
        "returns": np.float32,
    }
)
"""Arrays [N] over the tokens of all completions, by name; those of ``ALWAYS`` are never absent. Logprobs are in nats.

``engine_logprobs``: the engine's. ``logprobs``: the trainer's before the step's update. ``sampled_logprobs``: the
trainer's under the distribution that was sampled, only where top-k or top-p make it another one. ``mismatch``: the
trainer's logprob less the engine's. ``log_ratio``: logprob in the last pass of the update less that before the update.
``ref_log_ratio``: ``logprobs`` less the reference policy's. ``entropy``: of the last pass, in nats. ``clipped``: -1
where the algorithm clipped the ratio from below, 1 from above. ``values``, ``returns``: the critic's, and its targets.
A NaN stands for a token that has none.

Differences are stored beside logprobs because they need it: float16 has 11 bits, which are 0.008 nats at -10, and the
differences are often smaller than that. Advantages, values and returns, which have no bound, are float32, as is what
an algorithm adds under ``loss/<name>``.
"""
ALWAYS: Final = ("token_ids", "flags", "policy_versions")
"""Columns that every step has."""
LOSS: Final = "loss/"
"""Prefix of the names of columns that an algorithm adds, float32."""

FORMAT: Final = "1"
LARGEST: Final = 256 << 20
"""Most bytes of a step's tensors before they are compressed."""
LEVEL: Final = 1
"""zlib's level: a higher one takes several times as long for a few percent."""


@dataclass(frozen=True)
class StepTokens:
    """The tokens of some completions of a step."""

    step: int
    rows: NDArray[Any]
    """[R] of ``ROW``."""
    columns: Mapping[str, Array]
    """Arrays [N] by the names of ``COLUMNS``, the completions end to end."""
    pieces: Mapping[int, bytes]
    """UTF-8 of each token that occurs, by its id; a character may be spread over several tokens."""

    def of_row(self, number: int) -> dict[str, Array]:
        """Return the columns of one completion, [n]."""
        ends = np.concatenate([[0], self.rows["num_tokens"].cumsum()])
        return {name: values[ends[number] : ends[number + 1]] for name, values in self.columns.items()}

    def find(self, group: int, index: int) -> int | None:
        """Return the number of a completion's row, or ``None`` without one."""
        found = np.flatnonzero((self.rows["group"] == group) & (self.rows["index"] == index))
        return int(found[0]) if len(found) else None


def dtype_of(name: str) -> Any:
    """Return the dtype in which a column is stored."""
    return np.float32 if name.startswith(LOSS) else COLUMNS[name]


def encode(tokens: StepTokens) -> tuple[bytes, int]:
    """Return the tokens as compressed bytes, and how many these were before."""
    ids = np.array(sorted(tokens.pieces), np.int32)
    texts = [tokens.pieces[int(token_id)] for token_id in ids]
    arrays = {f"row/{name}": np.ascontiguousarray(tokens.rows[name]) for name in ROW.names or ()}
    with np.errstate(over="ignore"):  # a logprob of less than -65,504 is -inf then
        arrays |= {f"token/{name}": values.astype(dtype_of(name)) for name, values in tokens.columns.items()}
    arrays["piece/ids"] = ids
    arrays["piece/lengths"] = np.array([len(text) for text in texts], np.int32)
    arrays["piece/bytes"] = np.frombuffer(b"".join(texts), np.uint8)
    raw = save(arrays, {"format": FORMAT})  # the order of two keys would be random
    return zlib.compress(raw, LEVEL), len(raw)
