"""Samples that are alike but for a part, by which a cache or a table may take one for another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from rlplug.types import Sample
from rlplug_devkit.tasks.scoring import with_answer, with_completion

MIDDLE: Final = " and so on" * 200
"""What long completions have in common."""


def asked_otherwise(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of other prompts."""
    return [with_answer(each, each.prompt.answer, f"And {each.prompt.text}") for each in samples]


def likenesses(samples: Sequence[Sample], answered: Sequence[Sample]) -> list[list[Sample]]:
    """Return batches of samples that are alike: of other tasks or sources, in other letters, long with a like part.

    Args:
        samples: Those of a reward.
        answered: The same completions with other answers.
    """
    texts = [each.completion for each in samples]
    pairs = list(zip(texts, [*texts[1:], *texts[:1]], strict=True))
    long = ([f"{one}{MIDDLE}{one}" for one in texts], *zip(*[_mixed(*pair) for pair in pairs], strict=True))
    return [
        list(samples),
        asked_otherwise(samples),
        _completed(samples, [f"{text.swapcase()} " if text.strip() else text for text in texts]),
        *(_completed(samples, some) for some in long),
        [_named_as(*pair) for pair in zip(answered, samples, strict=True)],
        list(answered),  # between others, it would come after the samples' own answers from both ends
    ]


def _named_as(sample: Sample, other: Sample) -> Sample:
    """Return a sample whose prompt has the uid of another: of a second source, as validation has one."""
    return dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, uid=other.prompt.uid))


def _mixed(one: str, other: str) -> tuple[str, str]:
    return f"{one}{MIDDLE}{other}", f"{other}{MIDDLE}{one}"


def _completed(samples: Sequence[Sample], texts: Sequence[str]) -> list[Sample]:
    return [with_completion(sample, text) for sample, text in zip(samples, texts, strict=True)]
