"""Makes the questions beside this file: sums, differences and products of two and three numbers.

The files are committed; run this only to change them: ``python examples/calculator/make_data.py``.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
SIZES = {"train": 200, "val": 50}
QUESTIONS = ["What is {}?", "Compute {}.", "{} = ?", "Work out {} and give the number alone."]
STORIES = [
    ("A shop has {a} boxes with {b} pens in each, and sells {c} pens. How many pens are left?", "{a} * {b} - {c}"),
    ("A train carries {a} people. {b} get off and {c} get on. How many people are on it now?", "{a} - {b} + {c}"),
    ("A book costs {a} coins. What do {b} of them cost?", "{a} * {b}"),
    ("A farm has {a} hens and {b} geese. How many birds is that?", "{a} + {b}"),
]


def expression(draw: random.Random) -> str:
    """Return an expression of two or three terms."""
    terms = [str(draw.randint(12, 999)) for _ in range(draw.choice([2, 3]))]
    return terms[0] + "".join(f" {draw.choice('+-*')} {term}" for term in terms[1:])


def question(draw: random.Random) -> dict[str, str]:
    """Return a question with its answer: two in three are bare expressions, the others a sentence or two."""
    if draw.random() < 2 / 3:
        formula = expression(draw)
        prompt = draw.choice(QUESTIONS).format(formula)
    else:
        story, shape = draw.choice(STORIES)
        numbers = {"a": draw.randint(200, 999), "b": draw.randint(12, 99), "c": draw.randint(12, 99)}
        prompt, formula = story.format(**numbers), shape.format(**numbers)
    return {"prompt": prompt, "answer": str(eval(formula))}  # made of this file's own numbers


def main() -> None:
    """Write the files, with no question in both."""
    draw, rows = random.Random(0), {}
    while len(rows) < sum(SIZES.values()):
        row = question(draw)
        rows[row["prompt"]] = row
    remaining = iter(rows.values())
    for name, size in SIZES.items():
        lines = [json.dumps(next(remaining)) + "\n" for _ in range(size)]
        (HERE / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
