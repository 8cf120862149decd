"""MultipleChoice: letters in the forms that models write them, and answers in those of data sets."""

from __future__ import annotations

import pytest
from rlplug_rewards.choice import MultipleChoice

from rlplug.errors import ConfigError
from rlplug.types import RewardError


@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("D", "The answer is D.", 1.0),
        ("C", "(C)", 1.0),
        ("B", "B) 12", 1.0),
        ("B", "The answer is C.", 0.0),
        ("B", "**B**", 1.0),
        ("B", r"\boxed{\text{(B)}}", 1.0),
        ("B", "<answer>B. Paris</answer>", 1.0),
        ("(B)", "Answer: B", 1.0),
        ("b", "Answer: B", 1.0),
        ("B. 12", "B", 1.0),
        (1, "B", 1.0),
        (1.0, "B", 1.0),
        (0, "B", 0.0),
        (["A", "B"], "B", 1.0),
        ("B", "A or B", 0.0),
        ("B", "<think>The answer is B.</think>", 0.0),
        ("B", "I do not know.", 0.0),
        ("A", "A student said so.", 0.0),
    ],
)
def test_letters(make_sample, answer, completion, value):
    assert MultipleChoice().score([make_sample(completion, answer)]) == [value]


@pytest.mark.parametrize(
    "choices", [["12", "Paris", "Rome"], {"text": ["12", "Paris", "Rome"], "label": ["A", "B", "C"]}]
)
def test_the_text_of_a_choice_counts_where_it_is_marked(make_sample, choices):
    texts = [r"\boxed{\text{Paris}}", "<answer>Rome</answer>", r"\boxed{B}", r"\boxed{D}", "<answer>Oslo</answer>"]
    samples = [make_sample(text, "B", choices=choices) for text in texts]
    assert MultipleChoice().score(samples) == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_options_are_those_of_all_verifiers(make_sample):
    assert MultipleChoice(answer_pattern="=> (.)").score([make_sample(text, "B") for text in ("=> B", "B")]) == [
        1.0,
        0.0,
    ]


@pytest.mark.parametrize("answer", ["Paris", 4, "E", float("nan"), True])
def test_answers_that_are_no_choice_stop_a_run(make_sample, answer):
    sample = make_sample("B", answer, choices=["1", "2", "3", "4"])
    with pytest.raises(ConfigError, match=r"'multiplechoice' cannot use the answer of prompt 'train.jsonl:0'"):
        MultipleChoice().check_prompts([sample.prompt])
    assert isinstance(MultipleChoice().score([sample])[0], RewardError)
