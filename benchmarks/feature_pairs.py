"""Writes what came of the runs of two features as a page, from the report of pytest.

``pytest -m "nightly or not nightly" tests/integration/test_feature_pairs.py --junitxml pairs.xml``, then
``python benchmarks/feature_pairs.py pairs.xml --out benchmarks/results/DATE-feature-pairs/README.md``; of several
reports, a later one has what it ran again.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from feature_cases import FEATURES, PAIRS, REFUSED

Pair = tuple[str, str]
Outcome = Literal["right", "refused", "failed"]
SIGNS: Final[Mapping[Outcome, str]] = {"right": "+", "refused": "r", "failed": "F"}


def read(reports: Sequence[Path]) -> tuple[dict[Pair, Outcome], float]:
    """Return what came of each pair that the reports have, and the seconds that they took."""
    by_id = {f"[{one}-{other}]": (one, other) for one, other in PAIRS}
    found: dict[Pair, Outcome] = {}
    seconds = 0.0
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            pair = by_id.get(case.get("name", "").removeprefix("test_two_features_keep_their_promises"))
            if pair is None or case.find("skipped") is not None:
                continue
            failed = case.find("failure") is not None or case.find("error") is not None
            found[pair] = "failed" if failed else "refused" if frozenset(pair) in REFUSED else "right"
            seconds += float(case.get("time", 0))
    return found, seconds


def page(title: str, found: Mapping[Pair, Outcome], seconds: float) -> str:
    """Return the page: a row for each feature, then each pair."""
    ran = f"{len(found)} of {len(PAIRS)} pairs ran, {seconds / max(len(found), 1):.1f} s each"
    counts = ", ".join(f"{list(found.values()).count(each)} {each}" for each in ("right", "refused", "failed"))
    lines = [
        *(f"# {title}", "", f"Two features of one run, two steps each; {ran}: {counts}."),
        "In every step that trains the policy there is a gradient, and every metric is a finite number. Refused",
        "pairs end before a model is loaded, with a message that names what is missing. Arguments and checks:",
        "[feature_cases.py](../../../tests/integration/feature_cases.py).",
        *("", "| feature | by | what it promises beside each other one | right | refused | failed | not run |"),
        "|---|---|---|---|---|---|---|",
    ]
    for name, feature in FEATURES.items():
        outcomes = [found.get(pair, "not run") for pair in PAIRS if name in pair]
        numbers = " | ".join(str(outcomes.count(each)) for each in ("right", "refused", "failed", "not run"))
        lines.append(f"| {name} | {feature.keys} | {feature.promise or 'the run ends well'} | {numbers} |")
    for outcome in ("refused", "failed"):
        pairs = [pair for pair in PAIRS if found.get(pair) == outcome]
        if pairs:
            names = "; ".join(f"{one} + {other}" for one, other in pairs)
            lines += ["", f"{outcome.capitalize()}: {names}."]
    return "\n".join([*lines, "", *triangle(found)]) + "\n"


def triangle(found: Mapping[Pair, Outcome]) -> Iterator[str]:
    """Yield a row for each feature, with a sign for each feature above it."""
    yield "Each feature beside those above it, the first one on the left: `+` right, `r` refused, `F` failed, `?` not"
    yield "run, `.` no pair."
    yield from ("", "```text")
    names = list(FEATURES)
    for number, name in enumerate(names):
        pairs = [(above, name) for above in names[:number]]
        signs = [SIGNS[found[pair]] if pair in found else "?" if pair in PAIRS else "." for pair in pairs]
        yield f"{name:<26}{''.join(signs)}".rstrip()
    yield "```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+", help="files of --junitxml")
    parser.add_argument("--title", default="Pairs of features", help="the page's")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(options.title, *read(options.reports)))


if __name__ == "__main__":
    main()
