"""What an algorithm returns, and the step's rows that a hook hands back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplug.errors import brief
from rlplug.interfaces.algorithm import Advantages, LossOutput
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.types import Sample, StepBatch

CORE_NAMES: Final = frozenset(
    {"loss", "policy/entropy", "router/differ", "batch/shared_tokens", "policy/skipped_updates", "critic/loss"}
    | {f"{model}/{name}" for model in ("policy", "critic") for name in ("grad_norm", "lr")}
)
"""Metrics of the update that the core computes itself."""


# ---- selection ----------------------------------------------------------------------------------------------------


def check_selection(call: PluginCall, group: Sequence[Sample], chosen: Any) -> Sequence[Sample]:
    """Return which samples of a group train, after a check that they are samples of this group."""
    if not isinstance(chosen, Sequence) or not all(isinstance(each, Sample) for each in chosen):
        raise call.violation("return a list of samples", f"returned {brief(chosen)}")
    if any(each.group != group[0].group for each in chosen):
        raise call.violation("return samples of the group that it got", "returned one of another group")
    return chosen


# ---- advantages ---------------------------------------------------------------------------------------------------


def accept_advantages(call: PluginCall, found: Any, batch: StepBatch) -> StepBatch:
    """Return the rows with an algorithm's result, whose shapes, dtypes and numbers fit them.

    Raises:
        RunError: They do not.
    """
    if not isinstance(found, Advantages):
        raise call.violation("return rlplug.interfaces.Advantages", f"returned {brief(found)}")
    if (found.of_sequences is None) == (found.of_tokens is None):
        which = "neither" if found.of_tokens is None else "both"
        raise call.violation("return of_sequences or of_tokens", f"returned {which}")
    num_tokens = int(batch.num_tokens.sum())
    sizes = {"of_sequences": batch.num_sequences, "of_tokens": num_tokens, "returns": num_tokens, "trains": num_tokens}
    for name, size in sizes.items():
        if (value := getattr(found, name)) is not None:
            _check_tensor(call, name, value, torch.bool if name == "trains" else torch.float32, size)
            if (index := first_nonfinite(value.detach().numpy())) is not None:
                raise call.violation(
                    f"return finite {name}", f"returned {value[index]} in {_place(batch, name, index)}"
                )
    if found.of_sequences is not None:
        batch = batch.with_advantages(found.of_sequences)
    changes = {"advantages": found.of_tokens, "returns": found.returns, "response_mask": found.trains}
    return batch.replace(**{name: value for name, value in changes.items() if value is not None})


def _check_tensor(call: PluginCall, name: str, value: Any, dtype: torch.dtype, size: int) -> None:
    words = f"return {name} as {str(dtype).removeprefix('torch.')} [{size}] on the CPU"
    if not isinstance(value, Tensor):
        raise call.violation(words, f"returned {brief(value)}")
    if value.dtype != dtype or list(value.shape) != [size] or value.device.type != "cpu":
        raise call.violation(words, f"returned {_words(value)}")


def _place(batch: StepBatch, name: str, index: int) -> str:
    if name == "of_sequences":
        return f"sequence {index}"
    sequence = int(batch.tokens.sequence_index[index])
    return f"trainable token {index - int(batch.num_tokens[:sequence].sum())} of sequence {sequence}"


def first_nonfinite(array: NDArray[Any]) -> int | None:
    """Return the index of the first NaN or infinity of an array [n]; ``None`` without one."""
    if not array.size or (np.isfinite(array.min()) and np.isfinite(array.max())):
        return None
    return int((~np.isfinite(array)).argmax())


# ---- the rows of a step -------------------------------------------------------------------------------------------


def check_rows(call: PluginCall, edited: Any, batch: StepBatch) -> StepBatch:
    """Return the rows that a hook made of ``batch``: the same tokens, with tensors of the same dtypes, all finite.

    Raises:
        RunError: They are other rows, or have something in them that cannot train.
    """
    must = "return what its yield gives, or replace(...) of it"
    if not isinstance(edited, StepBatch):
        raise call.violation(must, f"returned {brief(edited)}")
    if edited is batch:
        return edited
    if not _is_same(edited.lengths, batch.lengths):
        raise call.violation(must, f"returned {edited.num_sequences} other rows for {batch.num_sequences}")
    before, after = _arrays(batch), _arrays(edited)
    if missing := sorted(before.keys() - after.keys() - {"old_logprobs"}):
        raise call.violation("keep the tensors of the batch", f"removed {missing[0]!r}")
    for name, array in after.items():
        former = before.get(name)
        if array is former:
            continue
        if former is not None and array.dtype != former.dtype:
            raise call.violation(f"return {name!r} as {former.dtype}", f"returned {array.dtype}")
        if array.dtype.kind == "f" and first_nonfinite(array) is not None:
            raise call.violation(f"return finite {name}", "returned NaN or an infinity")
    for name in ("input_ids", "group_index"):
        if not _is_same(after[name], before[name]):
            raise call.violation(f"leave {name!r} as it is", "changed it")
    new, old = after["response_mask"], before["response_mask"]
    if new is not old and (added := np.count_nonzero(new > old)):
        raise call.violation("train on fewer tokens or as many", f"set response_mask of {added} tokens that must not")
    return edited


def _arrays(batch: StepBatch) -> dict[str, NDArray[Any]]:
    return {**batch.per_sequence, **batch.per_token}


def _is_same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one is other or np.array_equal(one, other)


# ---- losses -------------------------------------------------------------------------------------------------------


def check_loss(call: PluginCall, found: Any) -> LossOutput:
    """Return a micro-batch's loss: a float32 scalar with a gradient, and scalars by names that the core leaves free.

    It reads no value, which would wait for a GPU: after each mini-batch the core looks whether the loss is finite.

    Raises:
        RunError: It is something else.
    """
    if not isinstance(found, LossOutput):
        raise call.violation("return rlplug.interfaces.LossOutput", f"returned {brief(found)}")
    loss = found.loss
    if not isinstance(loss, Tensor) or loss.shape or loss.dtype != torch.float32:
        raise call.violation("return a loss that is a float32 scalar", f"returned {_words(loss)}")
    if not loss.requires_grad:
        raise call.violation("return a loss with a gradient", "returned one that depends on no weight")
    seen: set[str] = set()
    for field in ("metrics", "maxima", "minima"):
        values = getattr(found, field)
        if not isinstance(values, Mapping):
            raise call.violation(f"return {field} as a mapping", f"returned {brief(values)}")
        for name, value in values.items():
            if not isinstance(name, str) or name in CORE_NAMES or name in seen:
                raise call.violation(
                    f"give its {field} names of their own", f"returned {name!r}, which is another metric's name"
                )
            if not isinstance(value, Tensor) or value.shape or value.is_complex() or value.device != loss.device:
                raise call.violation(
                    f"return {field} that are scalar tensors on {loss.device}", f"returned {_words(value)} as {name!r}"
                )
            seen.add(name)
    return found


def check_per_token(call: PluginCall, found: LossOutput, logprobs: Tensor) -> dict[str, Tensor]:
    """Return what a loss says of single tokens, detached. It reads no value, which would wait for a GPU.

    Args:
        call: The algorithm's.
        found: What it returned.
        logprobs: float32 [K], which it was given.

    Raises:
        RunError: It is no mapping to numbers [K] on the device.
    """
    if not isinstance(found.per_token, Mapping):
        raise call.violation("return per_token as a mapping", f"returned {brief(found.per_token)}")
    for name, value in found.per_token.items():
        if not isinstance(name, str) or not 0 < len(name) <= 64 or name in ("logprobs", "entropy"):
            raise call.violation("give per_token names of its own", f"returned {brief(name)}")
        is_fit = isinstance(value, Tensor) and value.shape == logprobs.shape and value.device == logprobs.device
        if not is_fit or not (value.dtype == torch.bool or value.is_floating_point()):
            words = f"return per_token that is bool or float {list(logprobs.shape)} on {logprobs.device}"
            raise call.violation(words, f"returned {_words(value)} as {name!r}")
    return {name: value.detach() for name, value in found.per_token.items()}


def check_same_names(call: PluginCall, parts: Sequence[Mapping[str, Any]]) -> None:
    """Require that a loss has the same metrics for every micro-batch."""
    for part in parts:
        if part.keys() != parts[0].keys():
            odd = sorted(part.keys() ^ parts[0].keys())
            raise call.violation("return the same metrics for every micro-batch", f"returned {odd[0]!r} for some alone")


def _words(value: Any) -> str:
    if not isinstance(value, Tensor):
        return brief(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
