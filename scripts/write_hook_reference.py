"""Writes the table of hooks in docs/writing-a-plugin.md: arguments, since which version, what is deprecated.

``python scripts/write_hook_reference.py`` (or ``make docs``) writes it; ``--check`` writes nothing and exits with 1
when the table is not what ``rlplug/hookspecs.py`` says.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from distributions import ROOT
from written_files import with_table, write_or_check

from rlplug import hookspecs
from rlplug.plugin_checks import REGISTRATION_PREFIX

PAGE: Final = ROOT / "docs" / "writing-a-plugin.md"
BEGIN: Final = "<!-- Written by scripts/write_hook_reference.py from rlplug/hookspecs.py: run `make docs`. -->"


def hooks() -> dict[str, Callable[..., Any]]:
    """Return the specifications by name, in the order of the file."""
    return {name: hook for name, hook in vars(hookspecs).items() if name.startswith("rlplug_")}


def form_of(name: str, hook: Callable[..., Any]) -> str:
    """Return which of the four forms a hook has."""
    if name.startswith(REGISTRATION_PREFIX):
        return "registration"
    if name in hookspecs.WRAPPER_ONLY:
        return "wrapper"
    return "resolver" if hook.rlplug_spec["firstresult"] else "observation"  # type: ignore[attr-defined]


def table() -> str:
    """Return the version of the hook API, the kinds that are registered, and a row for each other hook."""
    kinds = [
        f"`{name.removeprefix(REGISTRATION_PREFIX)}` ({_since(name)})"
        for name, hook in hooks().items()
        if form_of(name, hook) == "registration"
    ]
    rows = [
        f"This is hook API {hookspecs.API_VERSION}. In brackets is the version that added a hook. Registration hooks "
        f'are `{REGISTRATION_PREFIX}KIND(registry)`, which call `registry.add("KIND", MyClass)`. '
        f"Kinds: {', '.join(kinds)}.",
        *("", "| hook | form | arguments | what it does |", "|---|---|---|---|"),
    ]
    for name, hook in hooks().items():
        if (form := form_of(name, hook)) != "registration":
            arguments = ", ".join(f"`{argument}`" for argument in inspect.signature(hook).parameters) or "none"
            rows.append(f"| `{name}` ({_since(name)}) | {form} | {arguments} | {_summary(hook)} |")
    return "\n".join(rows)


def _since(name: str) -> str:
    deprecated = hookspecs.DEPRECATED.get(name)
    return hookspecs.SINCE[name] + (f", deprecated {deprecated}" if deprecated else "")


def _summary(hook: Callable[..., Any]) -> str:
    """Return the first sentence of a hook's docstring, in Markdown."""
    text = (inspect.getdoc(hook) or "").partition("\n")[0].partition(". ")[0].removesuffix(".")
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


def main() -> int:
    return write_or_check(__doc__, PAGE, lambda page: with_table(page, BEGIN, table()))


if __name__ == "__main__":
    sys.exit(main())
