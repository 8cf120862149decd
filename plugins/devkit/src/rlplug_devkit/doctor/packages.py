"""Python, the packages that rlplug and its plugins need, engines' libraries, and the plugins."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Final

from rlplug_devkit.doctor.findings import Finding, Probe, ProbeError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OLDEST_PYTHON: Final = (3, 11)
GROUPS: Final = ("rlplug.plugins", "rlplug.commands")
"""Groups of entry points; the modules of the core that know them may be what fails to import."""
EXTRAS_OF_AUTHORS: Final = frozenset({"dev", "docs", "smoke", "test"})
"""Extras with what a plugin's own tests need."""
STATES: Final = {"loaded": "ok", "blocked": "note", "failed": "fails"}


def environment() -> Iterator[Finding]:
    """Look at rlplug, Python and the system."""
    yield Finding("environment", "rlplug", f"{metadata.version('rlplug')}, hook API {_hook_api()}")
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Finding("environment", "Python", found, "fails", "Use Python 3.11 or newer.")
    else:
        yield Finding("environment", "Python", found)
    yield Finding("environment", "system", platform.platform())


def _hook_api() -> str:
    try:
        from rlplug.hookspecs import API_VERSION
    except ImportError as error:
        return f"unknown ({error})"
    return API_VERSION


def plugin_distributions() -> list[str]:
    """Return the names of the distributions that have plugins or commands."""
    points = [point for group in GROUPS for point in metadata.entry_points(group=group)]
    return sorted({point.dist.name for point in points if point.dist is not None} - {"rlplug"})


def requirements() -> Iterator[Finding]:
    """Compare what is installed with what rlplug and the plugins' distributions ask for."""
    ours = ["rlplug", *plugin_distributions()]
    num_met = 0
    for distribution in ours:
        for requirement in _requirements(distribution):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            installed = _version(requirement.name)
            if installed is not None and requirement.specifier.contains(installed, prereleases=True):
                num_met += 1
                continue
            found = f"{installed or 'not'} installed, and {distribution} needs {requirement}"
            yield Finding("packages", requirement.name, found, "fails", f"pip install '{requirement}'")
    yield Finding("packages", "requirements", f"{num_met} met, of {', '.join(ours)}")
    for name in ("torch", "lightning", "transformers", "numpy"):
        if (installed := _version(name)) is not None:
            yield Finding("packages", name, installed)


def libraries() -> Iterator[Finding]:
    """Compare optional libraries, such as engines, with the versions in plugins' extras: those that were tested."""
    for distribution in plugin_distributions():
        extras = metadata.metadata(distribution).get_all("Provides-Extra") or []
        for extra in sorted(set(extras) - EXTRAS_OF_AUTHORS):
            wanted = [r for r in _requirements(distribution) if r.marker and r.marker.evaluate({"extra": extra})]
            wanted = [r for r in wanted if not r.marker or not r.marker.evaluate({"extra": ""})]
            for requirement in wanted:
                yield from _library(distribution, extra, requirement)


def _library(distribution: str, extra: str, requirement: Requirement) -> Iterator[Finding]:
    installed = _version(requirement.name)
    tested = f"{distribution}[{extra}] is tested with {requirement.specifier or 'any version'}"
    if installed is None:
        yield Finding("libraries of plugins", requirement.name, f"not installed; {tested}")
    elif requirement.specifier.contains(installed, prereleases=True):
        yield Finding("libraries of plugins", requirement.name, f"{installed}; {tested}")
    else:
        advice = f"pip install '{distribution}[{extra}]', or expect what nobody has tried."
        yield Finding("libraries of plugins", requirement.name, f"{installed}; {tested}", "warns", advice)


def certified() -> Iterator[Finding]:
    """Look for records of ``rlplug certify`` that are of the installed set."""
    from rlplug_devkit.certify.installed import verdicts

    found, problems = verdicts()
    for each in found:
        name = f"{each.engine} with {each.trainer}"
        yield Finding("certified sets", name, each.text, "ok" if each.is_certified else "note", each.advice)
    for problem in problems:
        yield Finding("certified sets", "a record", f"is refused: {problem}", "warns", "Install its package again.")
    if not found:
        advice = "rlplug certify --engine CLASS makes one."
        yield Finding("certified sets", "records", "none is of an installed engine and trainer", "note", advice)


def plugins_command(blocked: Sequence[str]) -> list[str]:
    """Return the command that imports the plugins, in a process of its own: an import may hang or crash."""
    return [
        sys.executable,
        "-m",
        "rlplug",
        *(w for name in blocked for w in ("--block", name)),
        "plugins",
        "--check",
        "--json",
    ]


def plugins(probe: Probe | None, blocked: Sequence[str]) -> Iterator[Finding]:
    """Report the state of each plugin, from the output of :func:`plugins_command`.

    Args:
        probe: The command; ``None`` to import nothing.
        blocked: Names of plugins to leave out.
    """
    if probe is None:
        for point in sorted(metadata.entry_points(group=GROUPS[0]), key=lambda point: point.name):
            where = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "of no distribution"
            state = "blocked" if point.name in blocked else "installed, not imported"
            yield Finding("plugins", point.name, f"{state}; {where}")
        return
    try:
        records = json.loads(probe.output())
    except (ProbeError, json.JSONDecodeError) as error:
        yield Finding("plugins", "all", f"rlplug plugins --check {error}", "fails", "Correct what it names.")
        return
    for record in records:
        where = f"{record['distribution']} {record['version']}, hook API {record['api_range'] or 'unknown'}"
        reason = f"; {record['reason']}" if record["reason"] else ""
        state = STATES.get(record["state"], "warns")
        advice = f"Correct that, or leave it out: --block {record['name']}." if state == "fails" else ""
        yield Finding("plugins", record["name"], f"{record['state']}; {where}{reason}", state, advice)  # type: ignore[arg-type]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str) -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(text) for text in metadata.requires(distribution) or []]
