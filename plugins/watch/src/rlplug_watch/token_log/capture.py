"""What a step's passes compute for single tokens, kept on the device until the step ends, for the token log.

No pass is run for it, and nothing waits for a GPU before the end of the step: then the values of the completions that
are logged are copied to the host at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug.distributed.strategy import RLFSDP2Strategy
from rlplug.observability.sample_records import SampleRows
from rlplug.types import Sample, StepBatch
from rlplug_watch.token_log.step_tokens import LOSS, PRODUCED, ROW, TRAINED

MOST_TOKENS: Final = 1 << 20
"""Most tokens of a step that are logged: about 16 MB before compression."""

_AT_HOME: Final = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")
"""Arrays of a batch that a token's home rank sends, and NaN for those that there are not."""
TOKEN: Final = np.dtype(
    [
        *((name, np.int32) for name in ("row", "position", "token_ids", "policy_versions")),
        ("flags", np.uint8),
        *((name, np.float32) for name in (*_AT_HOME, "trainer_logprobs")),
    ]
)
"""What the rank that generated a token knows of it."""
KEYS: Final = ("row", "place", "pass")
"""What names a token among those that a rank computed: its row, and its place among the row's trainable tokens."""


class TokenCapture:
    """Keeps the newest values of each token of a step.

    Args:
        samples_per_step: Most completions of a step that are logged.
        every_n_steps: Steps from one that is logged to the next; the first step is logged too.
        has_engine_logprobs: Whether the engine returns logprobs.
        is_truncated: Whether tokens are drawn from another distribution than the one that trains.
    """

    def __init__(
        self, samples_per_step: int, every_n_steps: int, has_engine_logprobs: bool, is_truncated: bool
    ) -> None:
        self._samples_per_step = samples_per_step
        self._every_n_steps = every_n_steps
        unknown = () if has_engine_logprobs else ("engine_logprobs", "mismatch")
        self._left_out = unknown if is_truncated else (*unknown, "sampled_logprobs")
        self._is_on = False
        self._names: list[str] = []
        self._num_passes = 0
        self._computed: dict[tuple[int, int], tuple[Mapping[str, Tensor], int, int, int]] = {}
        """Of each row, by its group and its place in it: tensors [K] of a micro-batch, the first of the K that is the
        row's and how many are, and the number of the pass: a later pass may be another rank's."""
        self._trainer_logprobs: Tensor | None = None

    def begin(self, step: int) -> None:
        """Begin a step, from 1."""
        self._clear()
        is_due = step == 1 or step % self._every_n_steps == 0
        self._is_on = is_due and self._samples_per_step > 0

    def add(self, rows: Sequence[tuple[int, int]], num_tokens: Sequence[int], per_token: Mapping[str, Tensor]) -> None:
        """See :meth:`rlplug.interfaces.token_log.TokenLog.add`."""
        if not self._is_on:
            return
        self._names = list(per_token)
        self._num_passes += 1  # the same on all ranks
        first = 0
        for row, count in zip(rows, num_tokens, strict=True):
            self._computed[row] = per_token, first, count, self._num_passes
            first += count

    def compared(self, trainer_logprobs: Tensor) -> None:
        """Keep the trainer's logprobs before the update under the distribution that was sampled, float32 [N]."""
        self._trainer_logprobs = trainer_logprobs

    def choose(self, rows: SampleRows) -> SampleRows:
        """Return the rows of a step that are logged: its first groups, whole if the first one fits, and else its first.

        Groups come in the order of their prompts, which is shuffled: they are like the others of the step.
        """
        if not self._is_on:
            return rows[:0]
        rows = rows[rows["total_tokens"].cumsum() <= MOST_TOKENS][: self._samples_per_step + 1]
        if len(rows) <= self._samples_per_step:
            return rows
        is_whole = rows["group_number"] < rows["group_number"][-1]
        return rows[is_whole] if is_whole.any() else rows[:-1]

    def collect(
        self, chosen: SampleRows, samples: Sequence[Sample], batch: StepBatch, strategy: RLFSDP2Strategy
    ) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        """Return the rows of a step's tokens, [R] of ``ROW``, and their columns, and forget the step. Collective.

        Args:
            chosen: What :meth:`choose` returned.
            samples: This rank's samples.
            batch: Their rows, as they trained.
            strategy: Exchanges arrays between ranks.
        """
        at_home = strategy.gather_arrays(self._at_home(chosen, samples, batch, strategy.global_rank))
        at_home = at_home[np.lexsort((at_home["position"], at_home["row"]))]
        # of ranks that share rows the first one sends
        sends = strategy.world_size == 1 or strategy.data_ranks.index(strategy.data_rank) == strategy.global_rank
        computed = strategy.gather_arrays(self._of_passes(chosen if sends else chosen[:0]))
        rows = np.zeros(len(chosen), ROW)
        rows["group"], rows["index"] = chosen["group_number"], chosen["place"]
        rows["num_tokens"] = np.bincount(at_home["row"], minlength=len(chosen))
        rows["prompt_tokens"] = chosen["total_tokens"] - rows["num_tokens"]
        with np.errstate(over="ignore", invalid="ignore"):  # of an update that went wrong
            columns = _columns(at_home, _aligned(at_home, computed), self._names)
        columns = {name: values for name, values in columns.items() if name not in self._left_out}
        self._clear()
        return rows, columns

    def _clear(self) -> None:
        self._computed, self._trainer_logprobs = {}, None

    def _at_home(self, chosen: SampleRows, samples: Sequence[Sample], batch: StepBatch, rank: int) -> NDArray[Any]:
        """Return the tokens of this rank's rows among ``chosen``, [n] of ``TOKEN``."""
        parts = [np.zeros(0, TOKEN)]
        arrays = {name: batch.per_token[name] for name in _AT_HOME if name in batch.per_token}
        if self._trainer_logprobs is not None:
            arrays["trainer_logprobs"] = self._trainer_logprobs.numpy()
        for number, row in enumerate(chosen):
            if row["rank"] != rank:
                continue
            index, sample = row["index"], samples[row["index"]]
            first = len(sample.prompt.token_ids)
            begin, end = batch.ends[index] + first, batch.ends[index + 1]
            part = np.zeros(end - begin, TOKEN)
            part["row"], part["position"] = number, np.arange(first, first + len(part))
            part["token_ids"], part["policy_versions"] = sample.token_ids[first:], sample.policy_versions()[first:]
            trained = batch.per_token["response_mask"][begin:end]
            part["flags"] = sample.response_mask[first:] * PRODUCED + trained * TRAINED
            for name in (*_AT_HOME, "trainer_logprobs"):
                part[name] = arrays[name][begin:end] if name in arrays else np.nan
            if "advantages" in batch.per_sequence:
                part["advantages"] = batch.per_sequence["advantages"][index]
            parts.append(part)
        return np.concatenate(parts)

    def _of_passes(self, chosen: SampleRows) -> NDArray[Any]:
        """Return what this rank computed for the tokens of rows among ``chosen``."""
        keys = [(name, np.int32) for name in KEYS]
        dtype = np.dtype([*keys, *((name, np.float32) for name in self._names)])
        heads, parts = [np.zeros(0, dtype)], []
        for number, row in enumerate(chosen):
            found = self._computed.get((int(row["group"]), int(row["place"])))
            if found is None:
                continue
            values, first, num_tokens, number_of_pass = found
            head = np.zeros(num_tokens, dtype)
            head["row"], head["place"], head["pass"] = number, np.arange(num_tokens), number_of_pass
            heads.append(head)
            parts.append(torch.stack([values[name][first : first + num_tokens].float() for name in self._names]))
        result = np.concatenate(heads)
        if parts:
            on_host = torch.cat(parts, dim=1).cpu().numpy()  # the one wait for the GPU
            for name, column in zip(self._names, on_host, strict=True):
                result[name] = column
        return result


def _aligned(at_home: NDArray[Any], computed: NDArray[Any]) -> NDArray[Any]:
    """Return the entries of ``computed`` for the tokens of ``at_home``, row after row; NaN where there is none."""
    aligned = np.zeros(len(at_home), computed.dtype)
    for name in (computed.dtype.names or ())[len(KEYS) :]:
        aligned[name] = np.nan
    trained = (at_home["flags"] & TRAINED) > 0
    rows = at_home["row"][trained]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    order = np.lexsort((-computed["pass"], computed["place"], computed["row"]))  # of a token, the last pass first
    known = computed["row"][order].astype(np.int64) << 32 | computed["place"][order]
    wanted = rows.astype(np.int64) << 32 | place
    index = np.searchsorted(known, wanted)
    found = index < len(known)
    found[found] = known[index[found]] == wanted[found]
    aligned[trained.nonzero()[0][found]] = computed[order][index[found]]
    return aligned


def _columns(at_home: NDArray[Any], passes: NDArray[Any], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the columns of the token log. Tokens that did not train have a NaN for all that training computed."""
    trained = (at_home["flags"] & TRAINED) > 0
    produced = (at_home["flags"] & PRODUCED) > 0

    def where(mask: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        return np.where(mask, values, np.full(1, np.nan, np.float32))

    computed = {name: where(trained, passes[name]) for name in names}
    new = computed.pop("logprobs", np.full(len(at_home), np.nan, np.float32))
    old, engine = where(trained, at_home["old_logprobs"]), where(produced, at_home["rollout_logprobs"])
    old = np.where(np.isnan(old), new, old)  # exactly on-policy: the only pass computes both
    sampled = where(trained, at_home["trainer_logprobs"])
    columns = {name: at_home[name] for name in ("token_ids", "flags", "policy_versions")}
    low, high = computed.pop("clipped_low", None), computed.pop("clipped_high", None)
    if low is not None and high is not None:
        columns["clipped"] = np.nan_to_num(high - low).astype(np.int8)
    found = {
        "advantages": where(trained, at_home["advantages"]),
        "engine_logprobs": engine,
        "logprobs": old,
        "sampled_logprobs": sampled,
        "mismatch": sampled - engine,
        "log_ratio": new - old,
        "ref_log_ratio": old - where(trained, at_home["ref_logprobs"]),
        "entropy": computed.pop("entropy", old * np.nan),
        "values": where(trained, at_home["values"]),
        "returns": where(trained, at_home["returns"]),
        **{f"{LOSS}{name}": values for name, values in computed.items()},
    }
    ratio = found.get(f"{LOSS}ratio")
    if ratio is not None and np.allclose(ratio, np.exp(found["log_ratio"]), rtol=1e-3, equal_nan=True):
        del found[f"{LOSS}ratio"]
    return columns | {name: values for name, values in found.items() if not np.isnan(values).all()}
