"""Sums over the tokens of completions that show another distribution than the reference's, also late and rarely."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy

from rlplug.types import Completion, Request, SamplingParams
from rlplug_devkit.reference import Array, ReferencePolicy, sampled_distribution

EARLY, MIDDLE = 12, 40
"""Numbers of tokens after which a token counts as of the middle, and as late."""


def deviations(
    policy: ReferencePolicy, requests: Sequence[Request], completions: Sequence[Completion]
) -> dict[str, float]:
    """Return by name how many standard deviations sums over all tokens are from their mean under the reference.

    Given the tokens before it, a token's value has a mean and a variance under the reference, and the sum of
    ``value - mean`` over all tokens is a martingale: divided by the root of the summed variances it is about normal,
    however long completions become and whatever they repeat. The completions are sampled at temperature 1.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for request, completion in zip(requests, completions, strict=True):
        ids = completion.token_ids.tolist()
        rows = sampled_distribution(policy.logits(request.prompt_ids, ids)[:-1], SamplingParams())
        ranks: list[float] = []
        for index, (token, row) in enumerate(zip(ids, rows, strict=True)):
            for name, values in _values(policy, ids[:index], row):
                mean = float(row @ values)
                _add(sums[name], float(values[token]) - mean, float(row @ (values - mean) ** 2))
            ranks.append(float(row[:token].sum() + row[token] / 2) - 0.5)
            variance = float(row @ (row.cumsum() - row / 2 - 0.5) ** 2)
            if index:
                _add(
                    sums["tokens follow from the random number before"],
                    ranks[-1] * ranks[-2],
                    variance * ranks[-2] ** 2,
                )
    return {name: total / math.sqrt(variance) for name, (total, variance) in sums.items() if variance > 1}


def _add(entry: list[float], value: float, variance: float) -> None:
    entry[0] += value
    entry[1] += variance


def _values(policy: ReferencePolicy, before: Sequence[int], row: Array) -> Iterator[tuple[str, Array]]:
    """Yield names and what each possible next token counts, [V]."""
    place = "early" if len(before) < EARLY else "in the middle" if len(before) < MIDDLE else "late"
    yield f"surprise of tokens {place}", -numpy.log(numpy.maximum(row, 1e-30))
    unlikely = row < 0.005
    if unlikely.any():
        yield "tokens of a probability below 0.5%", unlikely.astype(float)
    ends = numpy.zeros(len(row))
    ends[list(policy.ends)] = 1.0
    yield f"end tokens {place}", ends
    yield "the last five ids", (numpy.arange(len(row)) >= len(row) - 5).astype(float)
    if before:
        counts = numpy.bincount(before, minlength=len(row)).astype(float)
        yield f"repeated tokens {place}", (counts > 0).astype(float)
        yield "tokens by how often they came before", counts
        pairs = numpy.zeros(len(row))
        pairs[[after for one, after in pairwise(before) if one == before[-1]]] = 1.0
        yield "repeated pairs of tokens", pairs
