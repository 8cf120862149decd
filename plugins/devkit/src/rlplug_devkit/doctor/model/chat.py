"""Checks of the tokenizer and the chat template: sizes, texts that come back, conversations, and where they stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from rlplug.data.chat_template import RENDER_S, render_chat, set_chat_template_kwargs
from rlplug.errors import ConfigError
from rlplug.rollout.turns.observation_tokens import ObservationTokens
from rlplug.timeouts import call_within
from rlplug_devkit.doctor.model.results import Verdict
from rlplug_devkit.doctor.model.subject import Subject

Messages = Sequence[Mapping[str, Any]]

TEXT: Final = "What is 12 + 7?\n\tx = 3.5, naïve 日本 \U0001f600"
ASKED: Final = "rlplug asks"
ANSWERED: Final = "rlplug answers"
SYSTEM: Final = {"role": "system", "content": "rlplug rules"}
QUESTION: Final = {"role": "user", "content": ASKED}
ANSWER: Final = {"role": "assistant", "content": ANSWERED}


def sizes_fit(subject: Subject) -> Verdict:
    """Compare the tokenizer's ids with the embeddings, and texts with what their tokens say."""
    spec, tokenizer = subject.spec, subject.tokenizer
    embedded = subject.whole.get_input_embeddings().weight.shape[0]
    if embedded != spec.vocab_size:
        found = f"config.json says {spec.vocab_size} tokens, and the embeddings have {embedded}"
        return Verdict(found, "no", "Correct vocab_size in config.json.")
    found = f"{len(tokenizer)} tokens, {embedded} embedded, ends with {_named(tokenizer, spec.eos_token_ids)}"
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    if (back := tokenizer.decode(ids, clean_up_tokenization_spaces=False)) != TEXT:
        advice = "Rewards and logs read the decoded text; training is on token ids, and does not."
        return Verdict(f"{found}; {TEXT!r} comes back as {back[:40]!r}", "note", advice)
    return Verdict(found)


def conversations_render(subject: Subject) -> Verdict:
    """Render conversations as prompts and environments need them, and look at where an answer stops."""
    tokenizer = subject.tokenizer
    if tokenizer.chat_template is None:
        return Verdict("there is no chat template", "note", "Prompts are plain text: set data.chat to false.")
    verdict: Verdict = call_within(RENDER_S, lambda: _rendered(subject, tokenizer))
    return verdict


def _rendered(subject: Subject, tokenizer: PreTrainedTokenizerBase) -> Verdict:
    alone = render_chat([QUESTION], tokenizer, (), "a question")
    turns = render_chat([QUESTION, ANSWER, QUESTION], tokenizer, (), "a conversation of three messages")
    for text, expected in ((alone, [ASKED]), (turns, [ASKED, ANSWERED, ASKED])):
        if _place(text, expected) < 0:
            return Verdict(
                f"the template leaves out or reorders what was said: {text!r}", "no", "Correct the template."
            )
    continued = render_chat([QUESTION, ANSWER], tokenizer, (), "an answer to continue", continues=True)
    if not continued.endswith(ANSWERED):
        return Verdict(f"an answer to continue ends with {continued[-40:]!r}", "no", "Leave such prompts out.")
    if not (stop := _stop(subject, tokenizer)):
        after = turns[_place(turns, [ASKED, ANSWERED]) :][:40]
        return Verdict(
            f"after an answer the template writes {after!r}, which is no end token: they are "
            f"{_named(tokenizer, subject.spec.eos_token_ids)}",
            "no",
            "Add that token to eos_token_id in generation_config.json, or name it in sampling.stop.",
        )
    ObservationTokens(tokenizer, chat=True)
    notes = []
    try:
        if SYSTEM["content"] not in render_chat(
            [SYSTEM, QUESTION, ANSWER, QUESTION], tokenizer, (), "a system message"
        ):
            return Verdict("the template leaves out the system message", "no", "Leave data.system_prompt out.")
    except ConfigError:
        notes.append("it refuses a system message: leave data.system_prompt out")
    switch = _thinking(subject.tokenizer)
    found = f"question, turns, system message, an answer to continue; answers end with {stop}{switch}"
    return Verdict(found, "note", f"{'; '.join(notes).capitalize()}.") if notes else Verdict(found)


def _thinking(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return in words whether the template has ``enable_thinking``, and what it changes.

    Raises:
        ConfigError: The template refuses a value of it.
    """
    kept: Any = getattr(tokenizer, "chat_template_kwargs", {})
    texts = []
    try:
        for value in (True, False):
            try:
                set_chat_template_kwargs(tokenizer, {"enable_thinking": value})
            except ConfigError:
                return ""
            texts.append(render_chat([QUESTION], tokenizer, (), f"a question with enable_thinking {value}"))
    finally:
        tokenizer.chat_template_kwargs = kept
    return f"; enable_thinking {'changes prompts' if texts[0] != texts[1] else 'does not change a single question'}"


def _stop(subject: Subject, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the end token that follows an answer in a conversation, or nothing where none does."""
    text = render_chat([QUESTION, ANSWER, QUESTION], tokenizer, (), "a conversation of three messages")
    after = text[_place(text, [ASKED, ANSWERED]) :]
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    stop = next((each for each in ids if str(tokenizer.decode([each])).strip()), None)
    return _named(tokenizer, (stop,)) if stop in subject.spec.eos_token_ids else ""


def _place(text: str, expected: Sequence[str]) -> int:
    """Return the place behind the last of some texts that follow each other, or -1."""
    place = 0
    for each in expected:
        found = text.find(each, place)
        if found < 0:
            return -1
        place = found + len(each)
    return place


def _named(tokenizer: PreTrainedTokenizerBase, ids: Sequence[Any]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(each)!r}" for each in ids)
