"""Writes the table of versions in docs/writing-a-plugin.md: which plugin works with which rlplug and hook API.

``python scripts/write_compatibility.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1 when
the table is not what the plugins' ``pyproject.toml`` and ``RLPLUG_API_VERSION`` say. Either exits with 1 where a plugin
of this repository does not work with the core beside it.
"""

from __future__ import annotations

import ast
import sys
from typing import Final

from distributions import ROOT, Distribution, plugin_distributions
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from written_files import with_table, write_or_check

from rlplug.hookspecs import API_VERSION

PAGE: Final = ROOT / "docs" / "writing-a-plugin.md"
BEGIN: Final = "<!-- Written by scripts/write_compatibility.py from the plugins: run `make docs`. -->"


def api_range(distribution: Distribution) -> SpecifierSet | None:
    """Return the range of hook APIs that a plugin's module declares, read without importing it; none without plugin."""
    if not distribution.plugins:
        return None
    (package,) = distribution.packages
    for node in ast.parse((distribution.folder / "src" / package / "plugin.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RLPLUG_API_VERSION":
            return SpecifierSet(ast.literal_eval(node.value))
    raise SystemExit(f"{distribution.name} declares no RLPLUG_API_VERSION")


def core_range(distribution: Distribution) -> SpecifierSet:
    """Return the range of rlplug that a plugin's package requires."""
    requirements = map(Requirement, distribution.project["dependencies"])
    return next(requirement.specifier for requirement in requirements if requirement.name == "rlplug")


def table(core: Distribution) -> str:
    """Return the version of ``core``, and a Markdown table of the distributions by the versions that they need.

    Raises:
        SystemExit: One does not work with ``core``.
    """
    packages: dict[tuple[str, ...], list[str]] = {}
    for plugin in plugin_distributions():
        of_core, of_api = core_range(plugin), api_range(plugin)
        if core.version not in of_core or (of_api is not None and API_VERSION not in of_api):
            raise SystemExit(
                f"{plugin.name} {plugin.version} is for rlplug {of_core} and hook API {of_api}, and this is rlplug "
                f"{core.version} with hook API {API_VERSION}."
            )
        api = "no hooks" if of_api is None else _text(of_api)
        needed = plugin.version, _text(of_core), api, plugin.project["requires-python"]
        packages.setdefault(needed, []).append(f"`{plugin.name}`")
    rows = ["| version | works with rlplug | hook API | Python | packages |", "|---|---|---|---|---|"]
    rows += [f"| {' | '.join(needed)} | {', '.join(names)} |" for needed, names in sorted(packages.items())]
    python = core.project["requires-python"]
    return "\n".join([f"This is rlplug {core.version}, with hook API {API_VERSION}, for Python {python}.", "", *rows])


def _text(versions: SpecifierSet) -> str:
    return ",".join(sorted(map(str, versions), reverse=True))


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda page: with_table(page, BEGIN, table(Distribution(ROOT))))


if __name__ == "__main__":
    sys.exit(main())
