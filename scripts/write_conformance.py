"""Writes docs/api/conformance.md: what each kit holds a plugin to, check by check.

``python scripts/write_conformance.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the page is not what the kits say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Final

from distributions import ROOT
from rlplug_devkit.promised import OF_EVERY_PLUGIN, PROMISED
from rlplug_devkit.promises import KITS, promises_of
from written_files import write_or_check

PAGE: Final = ROOT / "docs" / "api" / "conformance.md"
HEAD: Final = """\
# What the conformance kits check

<!-- Written by scripts/write_conformance.py from the kits of rlplug-devkit: run `make docs`. -->

A row is a promise that every plugin of the kind makes, and the check that holds it to it. `rlplug check PACKAGE` runs
them for what an installed package brings; [writing a plugin](../writing-a-plugin.md#conformance-kits) shows the classes
to inherit, and [conformance](../conformance.md) which faults they are known to find. A check is left out only where a
plugin does not claim what it is about; one that could compare nothing fails.
"""


def sentences(promised: Mapping[str, Sequence[str]], checks: Container[str]) -> list[str]:
    """Return a table of sentences, each with those of its checks that a kit has."""
    lines = ["| promised | checks |", "|---|---|"]
    for text, names in promised.items():
        plain = re.sub(r":meth:`([\w.]+)`", r"`\1`", text).replace("``", "`")
        held_by = [name.replace("_", " ") for name in names if name in checks]
        lines += [f"| {plain} | {', '.join(held_by)} |"] if held_by else []
    return [*lines, ""]


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for kind, kit in KITS.items():
        promises = promises_of(kit)
        has_claims = any(promise.applies_to for promise in promises)
        head = ("promise", *(("of those that claim",) if has_claims else ()), "check")
        lines = [f"## {kind.capitalize()}", "", f"`{kit.__name__}`: {len(promises)} checks.", ""]
        if kind in PROMISED:
            module, promised = PROMISED[kind]
            names = {promise.check.removeprefix("test_") for promise in promises}
            lines += [f"Sentences of `{module}` and what every kind promises:", ""]
            lines += sentences({**promised, **OF_EVERY_PLUGIN}, names)
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for promise in promises:
            detail = promise.detail.replace("``", "`").replace("|", r"\|")
            says = f"{promise.words}: {detail}" if detail else promise.words
            claimed = (promise.applies_to or "all",) if has_claims else ()
            lines.append(f"| {' | '.join((says, *claimed, f'`{promise.check}`'))} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda _: page())


if __name__ == "__main__":
    sys.exit(main())
