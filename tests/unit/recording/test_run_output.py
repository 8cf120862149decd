"""What the terminal shows of a run's samples."""

from __future__ import annotations

import dataclasses

import pytest

from rlplug.observability import terminal
from rlplug.recording.run_output import print_samples

QUESTION = "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell?"
TEMPLATE = "<|im_start|>system\nYou are careful.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def shown(make_sample, monkeypatch, capsys):
    """Return the table of one sample, on a terminal so wide that no cell is folded."""
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.setattr(terminal, "_console", None)  # that of an earlier test is as wide as its terminal

    def show(messages=(), text="4", completion="4", turns=()):
        sample = make_sample(completion)
        prompt = dataclasses.replace(sample.prompt, messages=messages, text=text)
        print_samples([dataclasses.replace(sample, prompt=prompt, turns=turns)], step=1)
        return capsys.readouterr().out

    return show


def test_the_last_message_of_the_user_is_shown_in_whole_words(shown):
    """Catches a cell with the end of the chat template, which is the same for every prompt, or half of a word."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "?"}]
    table = shown([*messages, {"role": "user", "content": QUESTION}], TEMPLATE.format(QUESTION))
    assert "│ … 48 of her friends in April, and then half as many in May. How many did she sell? │" in table
    assert "im_start" not in table


@pytest.mark.parametrize(
    ("completion", "cell"),
    [("word " * 41, "word " * 39 + "word …"), ("x" * 201, "x" * 200 + " …"), ("x" * 200, "x" * 200)],
)
def test_a_long_completion_ends_with_a_whole_word(shown, completion, cell):
    """Catches a cut within a word, and a text without spaces of which nothing is left."""
    assert f"│ {cell} │" in shown(completion=completion)


def test_turns_are_told_apart(shown):
    """Catches a table in which the environment's answer reads as the policy's."""
    table = shown(completion="3higher4", turns=(("policy", "3"), ("environment", "higher"), ("policy", "4")))
    assert [word for word in ("policy: 3", "environment: higher", "policy: 4") if word in table] == [
        "policy: 3",
        "environment: higher",
        "policy: 4",
    ]
