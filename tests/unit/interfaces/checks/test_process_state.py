"""State of the process that a plugin's call leaves behind: an error where it spoils later steps, else a warning."""

from __future__ import annotations

import re
import signal
import warnings
from typing import Any

import pytest
import torch
from unit.interfaces.checks.seam_cases import Scripted

from rlplug.errors import RunError
from rlplug.interfaces.checks import process_state
from rlplug.interfaces.checks.calls import PluginCall
from rlplug.interfaces.checks.process_state import ProcessState, watched


@pytest.fixture
def same_process() -> Any:
    """Undo what a fault leaves."""
    rng, state = torch.get_rng_state(), ProcessState.now()
    process_state._SAID.clear()
    yield
    torch.set_default_dtype(state.default_dtype)
    torch.set_grad_enabled(state.gradients)
    torch.set_num_threads(state.num_threads)
    torch.set_rng_state(rng)
    signal.signal(signal.SIGTERM, state.terminate)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            "default dtype at torch.float32; it left torch.float64",
        ),
        (lambda: torch.set_grad_enabled(False), "leave torch.is_grad_enabled() at True; it left False"),
    ],
)
def test_state_that_spoils_later_steps_is_an_error(fault: Any, words: str, same_process: Any) -> None:
    with pytest.raises(RunError, match=re.escape(words)), watched(PluginCall(Scripted(), "generate")):
        fault()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch.get_num_threads()"),
        (lambda: torch.manual_seed(torch.initial_seed() ^ 1), "the seed of torch's global generator"),
        (lambda: signal.signal(signal.SIGTERM, lambda *_: None), "the handler of SIGTERM"),
    ],
)
def test_other_state_is_said_once(fault: Any, words: str, same_process: Any) -> None:
    for is_first in (True, False):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with watched(PluginCall(Scripted(), "generate")):
                fault()
        assert [words in str(each.message) and "Scripted.generate" in str(each.message) for each in said] == [
            True
        ] * is_first


def test_drawing_random_numbers_is_no_fault(same_process: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watched(PluginCall(Scripted(), "generate")):
            torch.rand(3)
