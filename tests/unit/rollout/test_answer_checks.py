"""Tokens and logprobs that no engine can have sampled are a fault that names who returned them, and the field."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplug.interfaces import EngineFault
from rlplug.rollout.answer_checks import check_tokens

VOCAB, MOST = 100, 6
SOURCE = "http://10.0.0.7:8000"

odd: st.SearchStrategy[Any] = st.sampled_from(
    [None, "1", [1], {}, math.nan, math.inf, -math.inf, 1.5, -1, VOCAB, 1 << 40, 1 << 80, 0.01, True, b"1", 1j]
)
ids = st.lists(st.integers(0, VOCAB - 1) | odd, max_size=MOST + 2)
logprobs = st.lists(st.floats(-50, 0) | odd, max_size=MOST + 2)


def is_good(token_ids: list[Any], values: list[Any]) -> bool:
    """Say the rules again, one token at a time."""
    if len(token_ids) != len(values) or len(token_ids) > MOST:
        return False
    if not all(isinstance(token, int) and 0 <= token < VOCAB for token in token_ids):
        return False
    numbers = all(isinstance(value, int | float) for value in values)
    return numbers and all(math.isfinite(value) and value <= 1e-3 for value in values)


@settings(max_examples=400)
@given(token_ids=ids, values=logprobs, same_length=st.booleans())
def test_what_cannot_be_sampled_is_a_fault(token_ids: list[Any], values: list[Any], same_length: bool) -> None:
    """Generates tokens and logprobs: a NaN that gets through makes the policy NaN, a token crashes it."""
    if same_length:
        token_ids, values = token_ids[: len(values)], values[: len(token_ids)]
    if all(type(token) is bool for token in token_ids) or all(type(value) is bool for value in values):
        return  # an array of bools alone is refused, and True among numbers is 1
    if is_good(token_ids, values):
        check_tokens(SOURCE, token_ids, values, MOST, VOCAB)
    else:
        with pytest.raises(EngineFault, match=rf"^{SOURCE} returned .*(token|logprob)"):
            check_tokens(SOURCE, token_ids, values, MOST, VOCAB)


def test_logprobs_that_an_engine_does_not_have_may_be_nan() -> None:
    check_tokens("Engine", (1, 2), (math.nan, math.nan), 2, None, has_logprobs=False)
    with pytest.raises(EngineFault, match="the token id -2 at index 1"):
        check_tokens("Engine", (1, -2), (math.nan, math.nan), 2, None, has_logprobs=False)
