"""Reasons for which completions end."""

from __future__ import annotations

import pytest
from rlplug_engines.colocated import as_finish_reason

from rlplug.errors import RunError


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_reasons_of_use_stay(reason: str) -> None:
    assert as_finish_reason("Tiny", "0/1", reason) == reason


@pytest.mark.parametrize("reason", ["error", None])
def test_other_reasons_are_refused(reason: str | None) -> None:
    with pytest.raises(RunError, match=rf"request 0/1: Tiny ended it with finish reason {reason!r}\."):
        as_finish_reason("Tiny", "0/1", reason)
