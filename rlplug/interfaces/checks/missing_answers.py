"""What to do about prompts without an answer, where a reward needs one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final

from rlplug.types import Prompt

_ANSWERS: Final = ("solution", "target", "label", "ground_truth", "gold", "reference", "expected", "output", "response")
"""Names that data sets give their answers."""


def explain(reward: str, prompts: Sequence[Prompt]) -> str:
    """Return a message that counts prompts without an answer, and names the first and the field that may be meant."""
    lacking = [prompt for prompt in prompts if prompt.answer is None]
    fields = lacking[0].metadata
    field = next((field for field in fields if field.lower() in _ANSWERS), None)
    field = field or next(iter(difflib.get_close_matches("answer", fields, 1)), None)
    if len(lacking) < len(prompts):
        fix = f"Correct its field {field!r}" if field else "Give it one, or remove it"
    elif field:
        fix = f"Set answer_key of this source to {field!r}"
    else:
        fix = f"Give them one; beside the prompt they have {', '.join(fields) or 'no field'}"
    return (
        f"{len(lacking):,} of {len(prompts):,} prompts ha{'s' if len(lacking) == 1 else 've'} no answer, and {reward} "
        f"of model.rewards needs one. The first is {lacking[0].uid}. {fix}. (A function that can do without takes "
        "answer=None.)"
    )
