"""What the checks of rewards and environments share: calls as a run makes them, hostile texts, random generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy
import pytest
import torch

from rlplug.timeouts import Call, TimeoutExecutor
from rlplug_devkit import claims
from rlplug_devkit.claims import ConformanceReport
from rlplug_devkit.process_guard import ProcessGuard
from rlplug_devkit.process_state import generator_states, moved

NUM_THREADS: Final = 8
UNUSUAL_SEED: Final = 918_273_645
NOT_COMPARED: Final = f"{claims.NOT_COMPARED}an earlier check says what is wrong with the calls"
HOSTILE: Final = {
    "nothing": "",
    "white space": " \n\t\r\n",
    "long": "1 + (" * 20_000,
    "control characters": "\x00\x1b[2J\x07\x7f",
    "end tokens": "<|im_end|><|endoftext|></s><think></tool_call>",
    "numbers": "1e400 -0 NaN 9" + "9" * 500 + " 1_000 ١٢٣",
    "brackets": "{" * 2000 + "[" * 2000,
    "other scripts": "日本語 עברית \u202eabc e\u0301 \U0001f469\u200d\U0001f680",
    "code": "__import__('os')._exit(3)",
    "markup": "[bold]</pre><script>alert(1)</script>%s{0}${x}",
}
"""Texts that a policy may write, by what they are."""


def run_calls(functions: Sequence[Callable[[], Any]], deadline_s: float) -> list[Call]:
    """Call functions as a run does: at once, in threads or on an event loop, each with a deadline.

    Returns:
        Their calls, of which each has a ``value`` or an ``error``. What a function returns is a list where it can be.
    """
    executor = TimeoutExecutor(deadline_s, NUM_THREADS)
    return executor.run(functions, [_as_list] * len(functions))


def _as_list(returned: Any) -> Any:
    is_list = hasattr(type(returned), "__iter__") and not isinstance(returned, str | bytes | dict)
    return list(returned) if is_list else returned


@contextmanager
def same_random_generators(subject: str) -> Iterator[None]:
    """Fail when the body draws from a random generator of the process, or seeds it."""
    kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(UNUSUAL_SEED)  # a body that seeds them alike each time has done so before
    numpy.random.seed(UNUSUAL_SEED)
    torch.manual_seed(UNUSUAL_SEED)
    before = generator_states()
    try:
        yield
    finally:
        names = moved(before)
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    assert not names, (
        f"{subject} moves the global generators {sorted(names)}, from which the rest of the run draws: a resumed run "
        "would differ. Draw from a generator of your own, such as random.Random(seed)."
    )


class TaskChecks:
    """Base class of the checks: their report, and settings that all have."""

    deadline_s = 30.0
    """Longest time for one call in seconds."""
    guard: ProcessGuard
    """What the checks of the class have changed of the process until now."""
    pytestmark = pytest.mark.timeout(600)  # of pytest-timeout: a call may hold the interpreter's lock

    def _subject(self) -> str:
        """Return the name of what is tested."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _report(self, request: pytest.FixtureRequest) -> None:
        if "guard" not in type(self).__dict__:
            type(self).guard = ProcessGuard()
        claim = "every check"
        ConformanceReport.of(request.config).include(
            request.node.nodeid.rpartition("::")[0], self._subject(), {claim: None}
        )
        request.node.user_properties.append(("rlplug_claim", claim))
