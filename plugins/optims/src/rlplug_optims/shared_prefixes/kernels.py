"""Triton kernels of attention in which one integer a token is the mask, with gradients.

They follow FlashAttention-2 (Dao, arXiv 2307.08691), and skip tiles in which nothing is seen: ``tiles`` and
``num_tiles`` list the others (:class:`~rlplug_optims.shared_prefixes.tile_lists.Lists`). Token k is seen by the queries
``k .. ends[k] - 1``. Row lengths are arguments, so a kernel is compiled once for the heads of a model. No sum depends
on the order in which programs run. Arguments that end in ``_head`` and ``_token`` are strides.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LENGTHS: Final = ("num_tokens", "num_listed")
"""Arguments for whose values no kernel is compiled anew."""
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

# fmt: off
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"


@triton.jit
def _load(
    tensor, first, num_tokens, stride, WHOLE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return [TOKENS, PADDED]; ``WHOLE`` says that all of these tokens exist."""
    tokens = tl.arange(0, TOKENS)[:, None]
    dims = tl.arange(0, PADDED)[None, :]
    places = tensor + first.to(tl.int64) * stride + tokens * stride + dims
    if WHOLE and WIDTH == PADDED:
        return tl.load(places)
    return tl.load(places, mask=(first + tokens < num_tokens) & (dims < WIDTH), other=0.0)


@triton.jit
def _store(tensor, values, first, num_tokens, stride, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    tokens = tl.arange(0, TOKENS)[:, None]
    dims = tl.arange(0, PADDED)[None, :]
    places = tensor + first.to(tl.int64) * stride + tokens * stride + dims
    tl.store(places, values.to(tensor.dtype.element_ty), mask=(first + tokens < num_tokens) & (dims < WIDTH))


@triton.jit
def _logits(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Return logits in units of log(2)."""
    if SOFTCAP:
        return softcap * (2.0 * tl.sigmoid(2.0 * (products * scale / softcap)) - 1.0) * LOG2E
    return products * (scale * LOG2E)


@triton.jit
def _through_softcap(d_logits, logits, softcap, SOFTCAP: tl.constexpr):
    """Return the gradients of logits before the soft cap."""
    if SOFTCAP:
        tanh = logits / (softcap * LOG2E)
        return d_logits * (1.0 - tanh * tanh)
    return d_logits


@triton.jit
def _seen(queries, keys, ends, positions, num_tokens, WINDOW: tl.constexpr):
    """Return which queries see which keys; one of both is a column, the other a row."""
    seen = (keys <= queries) & (queries < tl.load(ends + keys, mask=keys < num_tokens, other=0))
    if WINDOW:
        query_positions = tl.load(positions + queries, mask=queries < num_tokens, other=0)
        seen &= query_positions - tl.load(positions + keys, mask=keys < num_tokens, other=0) < WINDOW
    return seen


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    query, key, value, output, lse, sinks, ends, positions, tiles, num_tiles, num_listed, num_tokens, scale, softcap,
    query_head, query_token, key_head, key_token, value_head, value_token, output_head, output_token,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SINKS: tl.constexpr,
):
    first = tl.program_id(0) * QUERIES
    head = tl.program_id(1).to(tl.int64)
    tokens = first + tl.arange(0, QUERIES)
    own = _load(query + head * query_head, first, num_tokens, query_token, False, QUERIES, WIDTH, PADDED)
    key += head // GROUP * key_head
    value += head // GROUP * value_head
    if SINKS:  # a key without a value
        largest = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        sums = tl.full([QUERIES], 1.0, tl.float32)
    else:
        largest = tl.full([QUERIES], -1e30, tl.float32)
        sums = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    num_full = tl.load(num_tiles + tl.program_id(0))
    num_seen = tl.load(num_tiles + tl.num_programs(0) + tl.program_id(0))
    tiles += tl.program_id(0).to(tl.int64) * num_listed
    for masked in tl.static_range(2):
        begin = num_full if masked else 0
        end = num_seen if masked else num_full
        for place in range(begin, end):
            first_key = tl.load(tiles + place) * KEYS
            keys = _load(key, first_key, num_tokens, key_token, not masked, KEYS, WIDTH, PADDED)
            logits = _logits(tl.dot(own, tl.trans(keys), input_precision=PRECISION), scale, softcap, SOFTCAP)
            if masked:
                their = (first_key + tl.arange(0, KEYS))[None, :]
                seen = _seen(tokens[:, None], their, ends, positions, num_tokens, WINDOW)
                logits = tl.where(seen, logits, -1e30)  # finite: a query may see none of these, but sees itself
            new_largest = tl.maximum(largest, tl.max(logits, 1))
            decay = tl.exp2(largest - new_largest)
            weights = tl.exp2(logits - new_largest[:, None])
            largest = new_largest
            sums = sums * decay + tl.sum(weights, 1)
            values = _load(value, first_key, num_tokens, value_token, not masked, KEYS, WIDTH, PADDED)
            total = tl.dot(weights.to(values.dtype), values, total * decay[:, None], input_precision=PRECISION)
    _store(output + head * output_head, total / sums[:, None], first, num_tokens, output_token, QUERIES, WIDTH, PADDED)
    tl.store(lse + head * num_tokens + tokens, largest + tl.log2(sums), mask=tokens < num_tokens)


@triton.jit(do_not_specialize=LENGTHS)
def delta(
    output, d_output, delta, num_tokens, output_head, output_token, d_output_head, d_output_token,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr,
):
    """Write the product of each output and its gradient; within :func:`query_gradients` it made that one slower."""
    first = tl.program_id(0) * TOKENS
    head = tl.program_id(1).to(tl.int64)
    tokens = first + tl.arange(0, TOKENS)
    outputs = _load(output + head * output_head, first, num_tokens, output_token, False, TOKENS, WIDTH, PADDED)
    d_outputs = _load(d_output + head * d_output_head, first, num_tokens, d_output_token, False, TOKENS, WIDTH, PADDED)
    products = tl.sum(outputs.to(tl.float32) * d_outputs.to(tl.float32), 1)
    tl.store(delta + head * num_tokens + tokens, products, mask=tokens < num_tokens)


@triton.jit(do_not_specialize=LENGTHS)
def query_gradients(
    query, key, value, d_output, lse, delta, ends, positions, d_query, tiles, num_tiles, num_listed, num_tokens, scale,
    softcap, query_head, query_token, key_head, key_token, value_head, value_token, d_output_head, d_output_token,
    d_query_head, d_query_token, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    first = tl.program_id(0) * QUERIES
    head = tl.program_id(1).to(tl.int64)
    tokens = first + tl.arange(0, QUERIES)
    queries = _load(query + head * query_head, first, num_tokens, query_token, False, QUERIES, WIDTH, PADDED)
    d_outputs = _load(d_output + head * d_output_head, first, num_tokens, d_output_token, False, QUERIES, WIDTH, PADDED)
    own_lse = tl.load(lse + head * num_tokens + tokens, mask=tokens < num_tokens, other=0.0)[:, None]
    own_delta = tl.load(delta + head * num_tokens + tokens, mask=tokens < num_tokens, other=0.0)[:, None]
    key += head // GROUP * key_head
    value += head // GROUP * value_head
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    num_full = tl.load(num_tiles + tl.program_id(0))
    num_seen = tl.load(num_tiles + tl.num_programs(0) + tl.program_id(0))
    tiles += tl.program_id(0).to(tl.int64) * num_listed
    for masked in tl.static_range(2):
        begin = num_full if masked else 0
        end = num_seen if masked else num_full
        for place in range(begin, end):
            first_key = tl.load(tiles + place) * KEYS
            keys = _load(key, first_key, num_tokens, key_token, not masked, KEYS, WIDTH, PADDED)
            values = _load(value, first_key, num_tokens, value_token, not masked, KEYS, WIDTH, PADDED)
            logits = _logits(tl.dot(queries, tl.trans(keys), input_precision=PRECISION), scale, softcap, SOFTCAP)
            weights = tl.exp2(logits - own_lse)
            if masked:
                their = (first_key + tl.arange(0, KEYS))[None, :]
                seen = _seen(tokens[:, None], their, ends, positions, num_tokens, WINDOW)
                weights = tl.where(seen, weights, 0.0)
            d_logits = weights * (tl.dot(d_outputs, tl.trans(values), input_precision=PRECISION) - own_delta)
            d_logits = _through_softcap(d_logits, logits, softcap, SOFTCAP)
            total = tl.dot(d_logits.to(keys.dtype), keys, total, input_precision=PRECISION)
    _store(d_query + head * d_query_head, total * scale, first, num_tokens, d_query_token, QUERIES, WIDTH, PADDED)


@triton.jit(do_not_specialize=LENGTHS)
def key_gradients(
    query, key, value, d_output, lse, delta, ends, positions, d_key, d_value, tiles, num_tiles, num_listed,
    num_tokens, scale, softcap, query_head, query_token, key_head, key_token, value_head, value_token, d_output_head,
    d_output_token, d_key_head, d_key_token, d_value_head, d_value_token, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products are [KEYS, QUERIES]."""
    first = tl.program_id(0) * KEYS
    key += tl.program_id(1).to(tl.int64) * key_head
    value += tl.program_id(1).to(tl.int64) * value_head
    tokens = (first + tl.arange(0, KEYS))[:, None]
    keys = _load(key, first, num_tokens, key_token, False, KEYS, WIDTH, PADDED)
    values = _load(value, first, num_tokens, value_token, False, KEYS, WIDTH, PADDED)
    d_keys = tl.zeros([KEYS, PADDED], tl.float32)
    d_values = tl.zeros([KEYS, PADDED], tl.float32)
    num_full = tl.load(num_tiles + tl.program_id(0))
    num_seen = tl.load(num_tiles + tl.num_programs(0) + tl.program_id(0))
    tiles += tl.program_id(0).to(tl.int64) * num_listed
    for index in range(GROUP):
        head = tl.program_id(1).to(tl.int64) * GROUP + index
        for masked in tl.static_range(2):
            begin = num_full if masked else 0
            end = num_seen if masked else num_full
            for place in range(begin, end):
                first_query = tl.load(tiles + place) * QUERIES
                their = first_query + tl.arange(0, QUERIES)
                exists = their < num_tokens
                queries = _load(
                    query + head * query_head, first_query, num_tokens, query_token, not masked, QUERIES, WIDTH, PADDED
                )
                d_outputs = _load(
                    d_output + head * d_output_head, first_query, num_tokens, d_output_token, not masked, QUERIES,
                    WIDTH, PADDED,
                )
                their_lse = tl.load(lse + head * num_tokens + their, mask=exists, other=0.0)[None, :]
                their_delta = tl.load(delta + head * num_tokens + their, mask=exists, other=0.0)[None, :]
                logits = _logits(tl.dot(keys, tl.trans(queries), input_precision=PRECISION), scale, softcap, SOFTCAP)
                weights = tl.exp2(logits - their_lse)
                if masked:
                    seen = _seen(their[None, :], tokens, ends, positions, num_tokens, WINDOW)
                    weights = tl.where(seen, weights, 0.0)
                d_values = tl.dot(weights.to(d_outputs.dtype), d_outputs, d_values, input_precision=PRECISION)
                d_logits = weights * (tl.dot(values, tl.trans(d_outputs), input_precision=PRECISION) - their_delta)
                d_logits = _through_softcap(d_logits, logits, softcap, SOFTCAP)
                d_keys = tl.dot(d_logits.to(queries.dtype), queries, d_keys, input_precision=PRECISION)
    d_key += tl.program_id(1).to(tl.int64) * d_key_head
    d_value += tl.program_id(1).to(tl.int64) * d_value_head
    _store(d_key, d_keys * scale, first, num_tokens, d_key_token, KEYS, WIDTH, PADDED)
    _store(d_value, d_values, first, num_tokens, d_value_token, KEYS, WIDTH, PADDED)
