"""Answers by their meaning: the table, texts that nobody foresaw, and which part of a completion is one."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from answer_table import pairs
from rlplug_rewards.answers.equality import same_answers
from rlplug_rewards.answers.extraction import Found, after_thought, marked_answer
from rlplug_rewards.answers.judging import judge
from rlplug_rewards.answers.references import accepted_answers, as_mathematics, as_text

TABLE = list(pairs())


def is_right(references, completion):
    rest = after_thought(completion)
    answers = [as_mathematics(as_text(answer)) for answer in accepted_answers(references)]
    return rest is not None and judge(answers, marked_answer(rest) or Found(rest, False))


@pytest.mark.parametrize("kind", dict.fromkeys(pair.kind for pair in TABLE))
def test_answers_are_judged_as_by_hand(kind):
    chosen = [pair for pair in TABLE if pair.kind == kind]
    wrong = [pair for pair in chosen if is_right(pair.references, pair.completion) != (pair.is_right and pair.is_read)]
    assert wrong == []


def test_the_table_is_wide():
    counts = Counter(pair.is_right for pair in TABLE)
    assert min(counts.values()) > 600
    assert len({pair.kind for pair in TABLE}) > 20
    assert sum(not pair.is_read for pair in TABLE) < 0.01 * len(TABLE)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_equality_is_symmetric(step):
    for pair in TABLE[::step]:
        marked = marked_answer(pair.completion)
        if marked is not None and marked.is_marked and len(pair.references) == 1:
            reference = as_mathematics(pair.references[0])
            assert same_answers(reference, marked.text) == same_answers(marked.text, reference), (
                reference,
                marked.text,
            )


PIECES = [pair.references[0] for pair in TABLE] + [
    *(
        r"\frac",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "$",
        r"\boxed{",
        r"\text{",
        "^",
        "_",
        "|",
        "\\",
        ",",
        ";",
        " and ",
        " or ",
        "=",
        "<",
    ),
    *(
        r"\le",
        r"\cup",
        r"\pm",
        "%",
        "!",
        "...",
        r"\overline{",
        r"\sqrt[",
        "e",
        "i",
        "10^",
        "9^",
        "-",
        "+",
        "/",
        "*",
        ":",
        "'",
        "°",
        "½",
    ),
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "The answer is ",
        "not ",
        "\n",
        "#### ",
        "**",
        "&",
        r"\\",
        r"\begin{cases}",
    ),
    *(
        r"\end{cases}",
        "∞",
        "√",
        "１２",
        "٣",
        "\x00",
        "😀",
        "0x",
        "1e999",
        r"\lfloor",
        r"\infty",
        "km/h",
        "$$",
        r"\(",
        "0.",
        "x_",
        "C)",
    ),
]


def random_text(seed):
    drawn = random.Random(seed)
    return "".join(drawn.choice(PIECES) for _ in range(drawn.choice((1, 2, 3, 5, 9, 40))))


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.nightly)])
def test_random_texts_are_judged_soon_and_the_same_both_ways(count):
    """No text raises or takes long, and a comparison does not depend on which text is the reference."""
    for seed in range(count):
        one, other = random_text(seed), random_text(seed + 1_000_000)
        start = time.process_time()
        is_right("4", other)
        assert same_answers(one, other) == same_answers(other, one), (one, other)
        assert time.process_time() - start < 5, (one, other)


@pytest.mark.parametrize(
    "piece", ["1", "1,", "a ", "(", "{", r"\frac", "$", r"\boxed{", r"\boxed{1}", "^2", "A, ", "\n", " ", "wait, "]
)
def test_long_texts_are_judged_soon(piece):
    start = time.process_time()
    for text in (piece * 3000, rf"\boxed{{{piece * 3000}}}", "The answer is " + piece * 3000):
        is_right("4", text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "text",
    [
        r"\sum_{k=1}^{10000} (2000!-2000!)",
        r"\sum_{i=1}^{100}\sum_{j=1}^{100} \sin(ij)",
        r"\prod_{k=1}^{10^9} k",
        r"\sum_{k=1}^{n} \binom{n}{k} \sin(kx)^{0.3}",
        r"\gcd(" * 300 + "1,2" + ")" * 300,
        r"7^{7^{7^7}} \bmod 10",
    ],
)
def test_work_of_sums_is_bounded_before_it_begins(text):
    """A sum of many or large terms would run until the time limit, and so would a call in a call."""
    start = time.process_time()
    assert not same_answers(r"\sum_{k=1}^{n} k", text)
    assert time.process_time() - start < 2


def test_names_in_order_are_left_to_no_library():
    r"""math-verify multiplies the letters of ``\angle ABC``, and so calls it ``\angle BAC``."""
    assert not judge([r"\angle ABC"], Found(r"\angle BAC", True), lambda *_: True)
    assert judge([r"\int_0^1 f"], Found(r"\int_0^1 g", True), lambda *_: True)


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (12.0, ["12"]),
        (1e-05, ["0.00001"]),
        (True, ["true"]),
        ([3, "1/2"], ["3", "1/2"]),
        (("a", "b"), ["a", "b"]),
        (-0.5, ["-0.5"]),
        (1e22, ["10000000000000000000000"]),
    ],
)
def test_reference_answers_become_texts(answer, texts):
    assert [as_text(each) for each in accepted_answers(answer)] == texts


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), "", "  ", [], [[1, 2]], [None], ["a", float("nan")]])
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises(ValueError, match="answer"):
        accepted_answers(answer)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("He sells 9 eggs for 2 dollars.\n#### 18", "18"),
        (r"We add, so that $x = 3 + 4 = \boxed{7}$.", "7"),
        ("<answer>5</answer>", "5"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_a_solution_may_mark_its_answer(answer, text):
    assert as_mathematics(answer) == text


@pytest.mark.parametrize(
    "answer", [r"\frac{1}{", "{", "(1, 2", "First we add the two and then we divide by the number of them."]
)
def test_what_cannot_be_read_is_refused(answer):
    with pytest.raises(ValueError, match=r"can be read|is prose"):
        as_mathematics(answer)


@pytest.mark.parametrize(
    ("text", "begins", "rest"),
    [
        ("a", False, "a"),
        ("<think>a</think> b", False, " b"),
        ("a</think>b", True, "b"),
        ("a", True, None),
        ("<think>a", False, None),
        ("<think>a</think>b<think>c", False, None),
        ("[THINK]a[/THINK]b</s>", False, "b"),
    ],
)
def test_only_what_follows_the_thought_counts(text, begins, rest):
    assert after_thought(text, begins) == rest


@pytest.mark.parametrize(
    ("text", "is_cut_off", "found"),
    [
        ("<answer>1</answer>", True, "1"),
        ("<answer>1", False, "1"),
        ("<answer>1", True, None),
        (r"\boxed{1}", True, "1"),
        (r"\boxed{1", False, ""),
        ("1", False, None),
        (r"<answer>\boxed{1}</answer> \boxed{2}", False, "1"),
    ],
)
def test_tags_and_boxes_mark_an_answer(text, is_cut_off, found):
    marked = marked_answer(text, is_cut_off)
    assert (marked and marked.text) == found
