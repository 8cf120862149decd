"""Faults of algorithms: each is refused where it comes in, by one message that names the call."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from unit.interfaces.checks.seam_cases import LOSS, rows

from rlplug.errors import RunError
from rlplug.interfaces import Advantages, Algorithm, LossOutput
from rlplug.interfaces.checks.algorithms import check_loss, check_same_names, check_selection
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.training.advantages import compute_advantages
from rlplug.types import StepBatch


class Gives(Algorithm):
    """Returns what it was made with."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def advantages(self, batch: StepBatch) -> Any:
        return self.found

    def loss(self, micro_batch: Any, logprobs: Any, entropy: Any, denominators: Any) -> Any:
        return self.found


NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.zeros(2), "must return rlplug.interfaces.Advantages; it returned Tensor"),
        (Advantages(), "of_sequences or of_tokens; it returned neither"),
        (Advantages(torch.zeros(2), torch.zeros(5)), "of_sequences or of_tokens; it returned both"),
        (Advantages([0.0, 0.0]), "of_sequences as float32 [2] on the CPU; it returned list"),
        (Advantages(torch.zeros(3)), "of_sequences as float32 [2] on the CPU; it returned float32 [3]"),
        (Advantages(of_tokens=torch.zeros(2, 3)), "of_tokens as float32 [5] on the CPU; it returned float32 [2, 3]"),
        (Advantages(torch.zeros(2, dtype=torch.int64)), "it returned int64 [2]"),
        (Advantages(torch.zeros(2, dtype=torch.float64)), "it returned float64 [2]"),
        (Advantages(torch.zeros(2, device="meta")), "it returned float32 [2] on meta"),
        (Advantages(torch.tensor([0.0, NAN])), "finite of_sequences; it returned nan in sequence 1"),
        (
            Advantages(of_tokens=torch.tensor([0, 0, 0, NAN, 0])),
            "finite of_tokens; it returned nan in trainable token 1 of sequence 1",
        ),
        (
            Advantages(torch.zeros(2), returns=torch.zeros(2)),
            "returns as float32 [5] on the CPU; it returned float32 [2]",
        ),
        (
            Advantages(torch.zeros(2), returns=torch.full((5,), torch.inf)),
            "finite returns; it returned inf in trainable",
        ),
        (Advantages(torch.zeros(2), trains=torch.zeros(5)), "trains as bool [5]"),
        (Advantages(torch.zeros(2), metrics={"a": "b"}), "a number as metric 'a'; it returned str 'b'"),
        (Advantages(torch.zeros(2), metrics={1: 1.0}), "with printable text; it returned a metric named int 1"),
        (Advantages(torch.zeros(2), metrics=[1.0]), "metrics as a mapping of names to numbers"),
    ],
)
def test_advantages_that_cannot_train(found: Any, words: str) -> None:
    with pytest.raises(RunError) as error:
        compute_advantages(Gives(found), rows(), list)
    assert str(error.value).startswith("Gives.advantages in ")
    assert words in str(error.value), str(error.value)


def test_advantages_that_can_train_are_taken() -> None:
    fewer = torch.tensor([True, False, True, True, True])
    result = Advantages(None, torch.full((5,), 2.0), torch.zeros(5), fewer, {"a/b": np.float32(1)})  # type: ignore[dict-item]
    batch, metrics = compute_advantages(Gives(result), rows(), list)
    assert batch.per_token["response_mask"].tolist() == [False, True, False, False, True, True, True]
    assert metrics == {"a/b": 1.0}
    empty, _ = compute_advantages(Gives(Advantages(torch.zeros(0))), rows(0), list)
    assert empty.num_sequences == 0


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (LOSS, "must return rlplug.interfaces.LossOutput; it returned Tensor"),
        (LossOutput(2.0), "a loss that is a float32 scalar; it returned float 2.0"),  # type: ignore[arg-type]
        (LossOutput(LOSS.double()), "a float32 scalar; it returned float64 []"),
        (LossOutput(LOSS[None]), "a float32 scalar; it returned float32 [1]"),
        (LossOutput(LOSS.detach()), "a loss with a gradient; it returned one that depends on no weight"),
        (LossOutput(LOSS, {"a": 1.0}), "metrics that are scalar tensors on cpu; it returned float 1.0 as 'a'"),  # type: ignore[dict-item]
        (LossOutput(LOSS, {"a": torch.ones(2)}), "it returned float32 [2] on cpu as 'a'"),
        (LossOutput(LOSS, {}, {"a": torch.ones((), device="meta")}), "maxima that are scalar tensors on cpu"),
        (LossOutput(LOSS, {"loss": ONE}), "names of their own; it returned 'loss'"),
        (LossOutput(LOSS, {"policy/grad_norm": ONE}), "names of their own; it returned 'policy/grad_norm'"),
        (LossOutput(LOSS, {"a": ONE}, {"a": ONE}), "names of their own; it returned 'a'"),
        (LossOutput(LOSS, None), "metrics as a mapping; it returned NoneType None"),  # type: ignore[arg-type]
    ],
)
def test_losses_that_cannot_train(found: Any, words: str) -> None:
    with pytest.raises(RunError, match=re.escape(words)):
        check_loss(PluginCall(Gives(found), "loss"), found)


def test_micro_batches_with_other_metrics() -> None:
    with pytest.raises(RunError, match="the same metrics for every micro-batch; it returned 'b' for some alone"):
        check_same_names(PluginCall("X.loss"), [{"a": ONE}, {"a": ONE, "b": ONE}])


@pytest.mark.parametrize(
    ("chosen", "words"),
    [(None, "a list of samples; it returned NoneType"), ([1], "a list of samples; it returned list")],
)
def test_a_selection_of_no_samples(chosen: Any, words: str) -> None:
    with pytest.raises(RunError, match=words):
        check_selection(PluginCall("X.select"), [], chosen)
