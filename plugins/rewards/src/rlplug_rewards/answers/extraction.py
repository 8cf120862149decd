r"""The rule that says which part of a completion is its answer.

1. A thought is never an answer: what follows its last end counts. A thought that does not end leaves no answer.
   Nor is what follows an answer and a line that begins another question, which base models write.
2. With an ``answer_pattern``, the first group of its last match is the answer, and nothing else is.
3. Otherwise the last ``<answer>...</answer>``, and in it the last ``\boxed{...}`` if it has one.
4. Otherwise the last ``\boxed{...}``. Boxes that only "and", "or" or commas join are one list.
5. Otherwise a sentence that says what the answer is, or the last sentence: :mod:`rlplug_rewards.answers.prose`.

Of a completion that a limit of tokens cut off, only a complete tag or box counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

THOUGHTS: Final = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<scratchpad>", "</scratchpad>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
)
"""What begins and ends a thought, as DeepSeek, Qwen, Seed, MiniMax, PLaMo, Mistral, Kimi and others write it."""
END_TOKENS: Final = (
    *(
        f"<|{name}|>"
        for name in ("im_end", "eot_id", "endoftext", "end", "return", "eom_id", "end_of_text", "END_RESPONSE")
    ),
    *("</s>", "<eos>", "<end_of_turn>", "[e~[", "<|plamo:tag|>"),
)
QUESTION: Final = re.compile(r"\n[ \t]*(?:\*\*)?(?:Question|Q|Problem|Human|User)\s*:", re.IGNORECASE)
"""A line that begins a question."""
ANSWERED: Final = re.compile(r"####|\\boxed|</answer>|\banswer(?: is|:)", re.IGNORECASE)
ANSWER_TAG: Final = re.compile(r"<(/?)answer>", re.IGNORECASE)
BOX: Final = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
MOST_BOXES: Final = 32
"""Boxes at the end that are looked at."""
LONGEST: Final = 4000
"""Longest content of a box, in characters."""
JOINS: Final = re.compile(
    r"[\s$,;.*]*(?:\\text\{)?\s*(?:,|;|and|or)?\s*\}?[\s$]*(?:\\[,;: ]|\\quad|\\[()\[\]])*[\s$]*"
    r"(?:[A-Za-z](?:_\{?\w\}?)?\s*=[\s$]*)?"
)


@dataclass(frozen=True)
class Found:
    """The part of a completion that is its answer.

    Attributes:
        text: Its text.
        is_marked: Whether a pattern, a tag or a box marks it, so that all of the text is the answer.
        is_cut_off: Whether a limit of tokens cut off a text in which nothing is marked.
        surroundings: All that follows the thought, where a tag or a box marks a part of it.
    """

    text: str
    is_marked: bool
    is_cut_off: bool = False
    surroundings: str | None = None

    @property
    def whole(self) -> str:
        return self.text if self.surroundings is None else self.surroundings


def after_thought(text: str, begins_in_thought: bool = False) -> str | None:
    """Return what follows the last thought, or ``None`` where a thought does not end.

    Args:
        text: The completion.
        begins_in_thought: Whether the prompt ended with the beginning of a thought.
    """
    is_open, rest_at = begins_in_thought, 0
    for begin, end in THOUGHTS:
        opened, closed = text.rfind(begin), text.rfind(end)
        if closed >= 0:
            rest_at = max(rest_at, closed + len(end))
        if closed >= 0 and closed > opened:
            is_open = False
        if opened > closed and not text[:opened].rstrip().endswith("`"):
            return None
    return None if is_open else _without_end(_first_reply(text[rest_at:]))


def _first_reply(text: str) -> str:
    """Return a text up to another question, if an answer stands before one."""
    question = QUESTION.search(text)
    while question is not None and ANSWERED.search(text, 0, question.start()) is None:
        question = QUESTION.search(text, question.end())
    return text if question is None else text[: question.start()]


def _without_end(text: str) -> str:
    """Return a text without the tokens that end a turn, which some engines leave."""
    text = text.rstrip()
    while (
        shorter := next((text.removesuffix(token) for token in END_TOKENS if text.endswith(token)), None)
    ) is not None:
        text = shorter.rstrip()
    return text


def begins_thought(prompt: str) -> bool:
    """Return whether a prompt ends with the beginning of a thought, as chat templates of reasoning models write it."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in THOUGHTS))


def marked_answer(text: str, is_cut_off: bool = False) -> Found | None:
    """Return the answer that a tag or a box marks, or ``None`` where there is neither."""
    tagged = last_tag(text, is_cut_off)
    part = text if tagged is None else tagged
    boxed = last_box(part)
    if boxed is None and BOX.search(part):
        return Found("", True, surroundings=text)  # a box that is not closed holds nothing
    if boxed is not None:
        return Found(boxed, True, surroundings=text)
    return None if tagged is None else Found(tagged.strip(), True, surroundings=text)


def last_tag(text: str, is_cut_off: bool = False) -> str | None:
    """Return the text in the last ``<answer>``.

    A last tag that is not closed counts where the completion ended: ``</answer>`` may have been its stop string.
    """
    begin: int | None = None
    found: str | None = None
    for match in ANSWER_TAG.finditer(text):
        if not match[1]:
            begin = match.end()
        elif begin is not None:
            found, begin = text[begin : match.start()], None
    if begin is not None and not is_cut_off and text[begin:].strip():
        return text[begin:]
    return found


def last_box(text: str) -> str | None:
    """Return what the last closed box holds, with the boxes before it that only words of a list join."""
    matches = list(BOX.finditer(text))[-MOST_BOXES:]
    boxes = [box for box in (_box_at(text, match) for match in matches) if box is not None]
    outer = [box for box in boxes if not any(other[0] < box[0] and box[1] <= other[1] for other in boxes)]
    if not outer:
        return None
    joined = [outer[-1]]
    for box in reversed(outer[:-1]):
        between = text[box[1] : joined[0][0]]
        if "\n\n" in between or len(between) > 40 or not JOINS.fullmatch(between):
            break
        joined.insert(0, box)
    inner = [(last_box(content) or content).strip() for *_, content in joined]
    inner = inner[:1] if len(set(inner)) == 1 else inner  # the same answer twice
    return ", ".join(inner) if any(inner) else ""


def _box_at(text: str, match: re.Match[str]) -> tuple[int, int, str] | None:
    """Return begin, end and content of a box, or ``None`` where it is not closed."""
    at = match.end()
    while at < len(text) and text[at] in " \t\n":
        at += 1
    if at == len(text):
        return None
    if text[at] != "{":  # "\boxed 5", as MATH writes it
        if text[at] not in "-0123456789" and not (at > match.end() and text[at].isalnum()):
            return None
        end = at + 1
        while end < len(text) and (text[end].isalnum() or (text[end] in ".,/" and text[end + 1 : end + 2].isdigit())):
            end += 1
        return match.start(), end, text[at:end]
    depth, end = 0, at
    while end < min(len(text), at + LONGEST):
        if text[end] == "\\":
            end += 1
        elif text[end] == "{":
            depth += 1
        elif text[end] == "}":
            depth -= 1
            if depth == 0:
                return match.start(), end + 1, text[at + 1 : end]
        end += 1
    return None
