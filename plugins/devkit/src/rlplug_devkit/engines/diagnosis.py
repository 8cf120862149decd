"""Names the likely cause when an engine's tokens or logprobs differ from the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy

from rlplug.types import Completion, Request, SamplingParams
from rlplug_devkit.reference import Array, ReferencePolicy, greedy_gap, sampled_distribution

SMALL_GAP: Final = 0.3
"""Largest gap in nats that noise in weights or arithmetic explains: another prompt costs more."""


def cause_of_tokens(
    held: ReferencePolicy,
    others: Mapping[str, ReferencePolicy],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    tolerance: float,
) -> str:
    """Return what would explain greedy completions that are not the reference's; empty where nothing does.

    Args:
        held: Reference that the engine should agree with.
        others: References for weights that it held before, by name.
        requests: Requests of one call.
        completions: Their completions, of which some are wrong.
        tolerance: Largest gap in nats of a completion that is right.
    """
    pairs = list(zip(requests, completions, strict=True))
    wrong = [(r, c) for r, c in pairs if greedy_gap(held, [r], [c]) > tolerance]
    if not wrong:
        return ""
    for name, other in others.items():
        if greedy_gap(other, *_columns(wrong)) <= tolerance:
            return f"They are those of other weights that the engine held before or should hold later ({name!r})."
    if all(_fits_another(held, r, c, requests, tolerance) for r, c in wrong):
        return "They are those of other requests of the same call: keep each completion with its request."
    ends, pad = held.ends, held.pad
    changed = {
        "with a BOS before the prompt: do not add one": [((held.bos, *r.prompt_ids), c) for r, c in wrong],
        "for the prompt without padding ids: they are tokens like others": [
            (tuple(t for t in r.prompt_ids if t != pad), c) for r, c in wrong
        ],
        "for the prompt without end tokens: they are tokens like others": [
            (tuple(t for t in r.prompt_ids if t not in ends), c) for r, c in wrong
        ],
        "for the prompt without its first token": [(r.prompt_ids[1:], c) for r, c in wrong],
        "for the prompt without its last token": [(r.prompt_ids[:-1], c) for r, c in wrong],
    }
    for words, cases in changed.items():
        kept = [(Request("", ids, 0), c) for ids, c in cases if ids]
        if kept and greedy_gap(held, *_columns(kept)) <= tolerance:
            return f"They are right {words}."
    if greedy_gap(held, *_columns(wrong)) <= SMALL_GAP:
        return "The gap is small, as noise in weights or another dtype of the arithmetic leaves it."
    return ""


def _columns(pairs: Sequence[tuple[Request, Completion]]) -> tuple[list[Request], list[Completion]]:
    return [request for request, _ in pairs], [completion for _, completion in pairs]


def _fits_another(
    held: ReferencePolicy, request: Request, completion: Completion, requests: Sequence[Request], tolerance: float
) -> bool:
    others = [other for other in requests if other.prompt_ids != request.prompt_ids]
    return any(greedy_gap(held, [other], [completion]) <= tolerance for other in others)


def cause_of_logprobs(
    held: ReferencePolicy,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: SamplingParams,
    tolerance: float,
) -> str:
    """Return what would explain logprobs that are not the reference's; empty where nothing does.

    Args:
        held: Reference that the engine should agree with.
        requests: Requests of one call.
        completions: Their completions.
        sampling: How they were sampled.
        tolerance: Largest mean difference in nats of logprobs that are right.
    """
    said = numpy.concatenate([numpy.asarray(c.logprobs, dtype=float) for c in completions])
    for words, expected in _readings(held, requests, completions, sampling):
        with numpy.errstate(invalid="ignore"):
            if len(expected) == len(said) and float(numpy.nanmean(numpy.abs(expected - said))) <= tolerance:
                return f"They are {words}."
    return ""


def _readings(
    held: ReferencePolicy, requests: Sequence[Request], completions: Sequence[Completion], sampling: SamplingParams
) -> Iterator[tuple[str, Array]]:
    """Yield wrong readings of "the logprob of a token": what it is, and the numbers that it gives."""
    plain: list[Array] = []
    scaled: list[Array] = []
    right: list[Array] = []
    with numpy.errstate(divide="ignore"):
        for request, completion in zip(requests, completions, strict=True):
            logits = held.logits(request.prompt_ids, completion.token_ids)[:-1]
            chosen = numpy.array(completion.token_ids, dtype=int)[:, None]
            for rows, how in (
                (plain, SamplingParams()),
                (scaled, SamplingParams(temperature=sampling.temperature)),
                (right, sampling),
            ):
                drawn = numpy.log(sampled_distribution(logits, how))
                rows.append(numpy.take_along_axis(drawn, chosen, axis=-1)[:, 0])
    one, two, own = (numpy.concatenate(rows) for rows in (plain, scaled, right))
    yield "logprobs before temperature, top-k and top-p", one
    yield "logprobs after temperature, before top-k and top-p", two
    yield "logarithms to base 2", own / numpy.log(2)
    yield "positive: the sign is wrong", -own
    yield "probabilities", numpy.exp(own)
    yield "those of the token before", numpy.concatenate([numpy.roll(row, 1) for row in right])
    yield "those of the token after", numpy.concatenate([numpy.roll(row, -1) for row in right])
