"""Writes constraints-oldest.txt: the oldest versions that the distributions of this repository claim to work with.

``python scripts/write_oldest.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when the
file is not what the distributions' ``pyproject.toml`` say. ``make test-oldest`` runs the tests with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from distributions import ROOT, all_distributions
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from written_files import write_or_check

FILE: Final = ROOT / "constraints-oldest.txt"
HEAD: Final = "# Written by scripts/write_oldest.py from the lower bounds in all pyproject.toml: run `make docs`.\n"


OF_AUTHORS: Final = frozenset({"dev", "docs", "test"})
"""Extras with tools, of which nothing is claimed."""


def requirements() -> Iterator[Requirement]:
    """Yield what all distributions require of others, extras for users included."""
    distributions = all_distributions()
    own = {canonicalize_name(distribution.name) for distribution in distributions}
    for distribution in distributions:
        extras: dict[str, list[str]] = distribution.project.get("optional-dependencies", {})
        texts = [*distribution.project.get("dependencies", [])]
        texts += [text for extra, required in extras.items() if extra not in OF_AUTHORS for text in required]
        for requirement in map(Requirement, texts):
            if canonicalize_name(requirement.name) not in own:
                yield requirement


def oldest() -> dict[str, Version]:
    """Return the oldest version of each library that satisfies every lower bound."""
    found: dict[str, Version] = {}
    for requirement in requirements():
        for specifier in requirement.specifier:
            if specifier.operator == ">=":
                name, version = canonicalize_name(requirement.name), Version(specifier.version)
                found[name] = max(found.get(name, version), version)
    return found


def main() -> int:
    return write_or_check(
        __doc__, FILE, lambda _: HEAD + "".join(f"{name}=={version}\n" for name, version in sorted(oldest().items()))
    )


if __name__ == "__main__":
    sys.exit(main())
