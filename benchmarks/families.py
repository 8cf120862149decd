"""Tries every causal family of transformers as a tiny policy, and variants of each, and writes the table of the docs.

    python benchmarks/families.py --out OUT
    python benchmarks/families.py --out OUT --page docs/api/families.md

A model type is one of ``AutoModelForCausalLM``, and a variant has one option changed. Each is built with random
weights, saved, and tried as a run does at its start, then as training computes: ``family_trials.py`` in the tests of
rlplug-hybrids says what is compared. A line of ``OUT/families.jsonl`` is one trial; those there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "plugins" / "hybrids" / "tests"))
from family_trials import CLOSE, GRADIENTS, LENGTHS, Trial, tried
from tiny_families import families, tiny, variants

Line = dict[str, Any]
HEAD: Final = """# Families of models

Every model type that `AutoModelForCausalLM` of transformers {version} builds, as a tiny random policy in float32 on a
CPU, and variants of it with one option changed: `benchmarks/families.py` tries them and writes this page. Any other
model is tried by its structure at the start of a run: no list decides.

- **right**: packed logprobs of sequences of {lengths} tokens are within {close:g} of those that transformers computes
  of each row alone, in evaluation, with its own attention, and gradients within {gradients:g}; two passes in training
  are equal; another neighbour changes nothing; the weights were loaded from files, and what engines and checkpoints
  get has the names and values of what transformers saves. Differences of logprobs count in the largest logprob, those
  of a parameter's gradient in its norm or in 1% of the model's.
- **refused**: a run ends at its start, with that reason. Each was tried with `PaddedTrainer` last. Encoders, such as
  BERT, are not causal unless their configuration has `is_decoder`, so that a run has nothing to train of them.
- **not built**: transformers builds no such policy from its configuration, or none that is tiny.

Variants of a model type without a number were not tried.

"""


def each_trial(names: Sequence[str], with_variants: bool, done: set[tuple[str, str]]) -> Iterator[Line]:
    """Yield a line for each model type and variant that is not done."""
    for family in names:
        try:
            changes = [{}, *(variants(tiny(family)) if with_variants else ())]
        except Exception as error:  # noqa: BLE001 - transformers refuses its own defaults
            if (family, "") not in done:
                yield {"family": family, "change": "", **asdict(Trial("not built", str(error)))}
            continue
        for change in changes:
            said = ", ".join(f"{option}={value}" for option, value in change.items())
            if (family, said) not in done:
                with tempfile.TemporaryDirectory() as folder:
                    yield {"family": family, "change": said, **asdict(try_one(family, change, Path(folder)))}


def try_one(family: str, change: Line, folder: Path) -> Trial:
    try:
        config = tiny(family, **change)
    except Exception as error:  # noqa: BLE001 - the option does not go with the others
        return Trial("not built", str(error))
    return tried(config, folder)


def page_of(lines: Sequence[Line]) -> str:
    """Return the page: counts, and a row for each model type."""
    counts = Counter(line["outcome"] for line in lines)
    types = Counter(line["outcome"] for line in lines if not line["change"])
    outcomes = ("right", "refused", "not built", "wrong")
    said = [f"{counts[outcome]:,} {outcome} ({types[outcome]} model types)" for outcome in outcomes]
    rows = ["| model type | trainer | result | variants that are right | others |", "|---|---|---|---|---|"]
    for family in dict.fromkeys(line["family"] for line in lines):
        own = [line for line in lines if line["family"] == family]
        base, *others = own
        right = sum(line["outcome"] == "right" for line in others)
        differing = [line for line in others if line["outcome"] != "right"] if base["outcome"] == "right" else []
        cells = [
            f"`{family}`",
            base["trainer"] if base["outcome"] != "not built" else "",
            result(base),
            f"{right} of {len(others)}" if others else "",
            "; ".join(f"`{line['change']}`: {result(line)}" for line in differing),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    near = {"close": CLOSE, "gradients": GRADIENTS}
    head = HEAD.format(version=transformers.__version__, lengths=", ".join(map(str, LENGTHS)), **near)
    return f"{head}{len(lines):,} policies: {', '.join(said)}.\n\n" + "\n".join(rows) + "\n"


def result(line: Line) -> str:
    """Return a trial's outcome for a cell: with the differences, or with the reason."""
    if line["outcome"] == "right":
        return f"right ({line['logprobs']:.0e}, {line['gradients']:.0e})"
    reason = re.sub(r"^model\.policy(\.path)?( '[^']*')?: | Set model\.trainer.*", "", " ".join(line["reason"].split()))
    return f"{line['outcome']}: {reason[:200]}".replace("|", "/").replace("<", "&lt;")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=families(), metavar="TYPE")
    parser.add_argument("--no-variants", action="store_true", help="the model types alone")
    parser.add_argument("--out", type=Path, required=True, help="folder for families.jsonl")
    parser.add_argument("--page", type=Path, help="write the page of the docs there")
    return parser.parse_args()


def main() -> int:
    options = parse()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "families.jsonl"
    lines: list[Line] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["family"], line["change"]) for line in lines}
    for line in each_trial(options.families, not options.no_variants, done):
        lines.append(line)
        with file.open("a") as log:
            log.write(json.dumps(line) + "\n")
        if line["outcome"] != "right":
            print(f"{line['family']} {line['change']}: {result(line)}", flush=True)
    print(dict(Counter(line["outcome"] for line in lines)))
    if options.page is not None:
        lines.sort(key=lambda line: (line["family"], bool(line["change"])))
        options.page.write_text(page_of(lines))
    return int(any(line["outcome"] == "wrong" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
