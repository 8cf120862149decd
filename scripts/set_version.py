"""Sets the version of all distributions, and the ranges in which they require each other.

``python scripts/set_version.py 0.2.0`` rewrites each pyproject.toml, and the examples of README.md and docs/ that name
a version. ``--check`` writes nothing and exits with 1 when they are not what the version in the root's pyproject.toml
asks for. Each distribution keeps its version in its own file, because it is built from its own folder.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from distributions import ROOT, Distribution, all_distributions
from packaging.version import Version

_OWN_VERSION: Final = re.compile(r'^version = "[^"]+"$', re.M)
_RANGE: Final = re.compile(r'"(rlplug[\w-]*)(\[[^]]*\])?>=[\d.]+,<[\d.]+"')
_LOADED: Final = re.compile(r"\((rlplug[\w-]*) \d[\w.]*, hook API")


def compatible_range(version: Version) -> str:
    """Return the versions that go with ``version``: before 1.0 those of its minor version, later those of its major."""
    end = f"{version.major + 1}" if version.major else f"0.{version.minor + 1}"
    return f">={version.major}.{version.minor},<{end}"


def changed_files(version: Version, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield each file that ``version`` changes, with its new text."""
    own = all_distributions(root)
    names = {distribution.name for distribution in own}
    own_files = [distribution.folder / "pyproject.toml" for distribution in own]
    examples = [*root.glob("tests/plugins/*/pyproject.toml"), root / "README.md", *root.glob("docs/*.md")]
    for file in [*own_files, *sorted(examples)]:
        text = file.read_text()
        new = _with_ranges(text, version, names)
        if file in own_files:
            new = _OWN_VERSION.sub(f'version = "{version}"', new, count=1)
        if new != text:
            yield file, new


def _with_ranges(text: str, version: Version, names: set[str]) -> str:
    """Replace ranges and shown versions of the distributions in ``names``; examples have distributions of their own."""

    def new_range(found: re.Match[str]) -> str:
        return f'"{found[1]}{found[2] or ""}{compatible_range(version)}"' if found[1] in names else found[0]

    def new_version(found: re.Match[str]) -> str:
        return f"({found[1]} {version}, hook API" if found[1] in names else found[0]

    return _LOADED.sub(new_version, _RANGE.sub(new_range, text))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", type=Version, nargs="?", help="the new version; without it, the root's")
    parser.add_argument("--check", action="store_true", help="only compare, and exit with 1 when a file differs")
    options = parser.parse_args(arguments)
    version = options.version or Version(Distribution(ROOT).version)
    changes = dict(changed_files(version))
    if options.check:
        for file in changes:
            print(f"{file} does not fit version {version}: run scripts/set_version.py {version}.", file=sys.stderr)
        return int(bool(changes))
    for file, text in changes.items():
        file.write_text(text)
        print(f"wrote {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
