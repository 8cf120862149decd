"""Scores in the answers of reward servers, checked: one finite number for each row, of the right model and length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rlplug.errors import brief
from rlplug.interfaces.plain_values import MAX_REWARD
from rlplug_rewards.requests.json_client import malformed


def vllm_scores(answer: Any, lengths: Sequence[int], names: Collection[str]) -> list[float]:
    """Return the scores in an answer of vLLM's route ``/classify``, in the order of the rows.

    Args:
        answer: ``{"model": ..., "data": [{"index": ..., "probs": [...]}, ...], "usage": {"prompt_tokens": ...}}``.
        lengths: Numbers of tokens of the rows that were sent.
        names: Names that the model has at the server.

    Raises:
        RequestError: It is something else.
    """
    if not isinstance(answer, dict):
        raise malformed(f"the answer is no object but {brief(answer, 200)}")
    if answer.get("model") not in names:
        raise malformed(f"the answer is of the model {brief(answer.get('model'))}, not of {sorted(names)[0]!r}")
    items = _items(answer.get("data"), len(lengths))
    usage = answer.get("usage")
    _check_length(usage.get("prompt_tokens") if isinstance(usage, dict) else None, sum(lengths))
    scores: dict[int, float] = {}
    for item in items:
        index = item.get("index")
        if type(index) is not int or not 0 <= index < len(lengths) or index in scores:
            raise malformed(f"the answer's index {brief(index)} is none of {len(lengths)} rows, or stands twice")
        scores[index] = _score(item.get("probs"))
    return [scores[index] for index in range(len(lengths))]


def sglang_scores(answer: Any, lengths: Sequence[int]) -> list[float]:
    """Return the scores in an answer of SGLang's route ``/classify``, in the order of the rows.

    Args:
        answer: ``[{"embedding": [...], "meta_info": {"prompt_tokens": ...}}, ...]``, in the order of the rows.
        lengths: Numbers of tokens of the rows that were sent.

    Raises:
        RequestError: It is something else.
    """
    scores = []
    for item, length in zip(_items(answer, len(lengths)), lengths, strict=True):
        about = item.get("meta_info")
        _check_length(about.get("prompt_tokens") if isinstance(about, dict) else None, length)
        scores.append(_score(item.get("embedding")))
    return scores


def _items(found: Any, number: int) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise malformed(f"the answer has no list of scores: {brief(found, 200)}")
    if len(found) != number:
        raise malformed(f"the answer has {len(found)} scores for {number} rows")
    return found


def _check_length(found: Any, sent: int) -> None:
    """Refuse a score of other tokens than were sent: some were cut off, or added."""
    if type(found) is not int or found != sent:
        raise malformed(f"the server has read {brief(found)} tokens, and {sent} were sent")


def _score(values: Any) -> float:
    if not isinstance(values, list) or not values or not all(type(value) in (int, float) for value in values):
        raise malformed(f"a score is no list of numbers but {brief(values, 200)}")
    if len(values) != 1:
        raise malformed(
            f"the model gives {len(values)} numbers for a conversation: a reward model gives one. Models of several "
            "labels, of tokens or of steps are not taken"
        )
    if not abs(values[0]) <= MAX_REWARD:
        raise malformed(f"a score is {brief(values[0])}: its size must be {MAX_REWARD:g} at most")
    return float(values[0])
