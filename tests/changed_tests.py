"""``pytest --changed``: the tests of every push. What nothing has changed is left out, and said; a night runs all.

What has changed since a commit, the one of ``$BASE`` or else where the branch left ``origin/main``, decides:

    a file of a distribution under plugins/    its tests, those of distributions that require it, the core's
                                               integration tests, and its unit tests that import one of these
    any other file                             all tests
    no file of a test's own distribution       what is marked ``kit`` runs at night, as what is marked ``nightly``
    a page of the documentation                its blocks; those of README.md and docs/first-run.md always run

Where there is no such commit, or it is the checkout's own, the tests of all distributions run.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from distributions import ROOT, plugin_distributions

PAGES = "tests/integration/test_docs.py"
ALWAYS = {"README.md", "docs/first-run.md"}
"""Pages whose blocks run on every push."""
FIXTURES = ("model_fixtures.py", "batch_fixtures.py")
"""Files of ``tests`` with fixtures of all tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out tests of what has not changed since $BASE, or since the branch left origin/main"
    parser.addoption("--changed", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is nightly
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    base = changed_files() if config.getoption("--changed") else None
    changed = base or frozenset()
    for item in items:
        if item.get_closest_marker("kit") and not is_of_a_change(item.nodeid, changed):
            item.add_marker("nightly")
    if not config.getoption("--changed"):
        return
    left_out = frozenset() if base is None else parts_left_out(changed)
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        kept[not is_left_out(item.nodeid, changed, left_out)].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--changed"):
        session.exitstatus = pytest.ExitCode.OK  # nothing that these tests look at has changed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--changed"):
        return
    changed = changed_files()
    if changed is None:
        terminalreporter.write_line("nothing to compare with: the tests of all distributions ran")
    left_out = sorted(parts_left_out(changed) if changed is not None else ())
    if left_out:
        parts = ", ".join([*left_out, "unit tests of the core that import none of the others"])
        terminalreporter.write_line(f"left out, because nothing that they test has changed: {parts}")
    if pages := sorted(ALWAYS | {file for file in changed or () if file.endswith(".md")}):
        terminalreporter.write_line(f"of the pages, the blocks of these ran: {', '.join(pages)}")
    terminalreporter.write_line("make test-all runs everything")


def is_left_out(test: str, changed: frozenset[str], left_out: frozenset[str]) -> bool:
    """Return whether nothing has changed of what a test, by its node id, looks at.

    Args:
        test: Such as ``plugins/algos/tests/test_grpo.py::test_a``.
        changed: Files that have changed.
        left_out: What :func:`parts_left_out` returns for them.
    """
    file, _, case = test.partition("::")
    if file == PAGES and (page := re.match(r"test_block\[(.+\.md):", case)):
        return page[1] not in changed | ALWAYS
    if left_out and file.startswith("tests/unit/"):
        ran = [each for each in plugin_distributions() if f"plugins/{each.folder.name}" not in left_out]
        names = {package for each in ran for package in each.packages}
        names |= {"from distributions import"}  # of tests that read all sources
        return not any(name in imports_of(file) for name in names)
    return "/".join(Path(file).parts[:2]) in left_out


@cache
def imports_of(file: str) -> str:
    """Return the text of a file of unit tests, of the helpers beside it and of the fixtures of all that it names."""
    beside = [each for each in (ROOT / file).parent.glob("*.py") if not each.name.startswith("test_")]
    text = "\n".join(each.read_text() for each in (ROOT / file, *beside))
    for fixtures in ((ROOT / "tests" / each).read_text() for each in FIXTURES):
        if any(name in text for name in re.findall(r"\ndef (\w+)", fixtures)):
            text += fixtures
    return text


def is_of_a_change(test: str, changed: frozenset[str]) -> bool:
    """Return whether files of a test's own distribution have changed."""
    folder = "/".join(Path(test).parts[:2])
    return any(file.startswith(f"{folder}/") for file in changed)


@cache
def parts_left_out(changed: frozenset[str]) -> frozenset[str]:
    """Return the folders of the distributions whose tests are left out."""
    if any(not file.startswith(("plugins/", "docs/")) and not file.endswith(".md") for file in changed):
        return frozenset()
    folders = {each.name: f"plugins/{each.folder.name}" for each in plugin_distributions()}
    touched = {name for name, folder in folders.items() if any(file.startswith(f"{folder}/") for file in changed)}
    while more := {each.name for each in plugin_distributions() if touched & each.requires} - touched:
        touched |= more
    return frozenset(folder for name, folder in folders.items() if name not in touched)


@cache
def changed_files() -> frozenset[str] | None:
    """Return the files that differ from the base, those that git does not know included; ``None`` without a base."""
    base = os.environ.get("BASE") or _git("merge-base", "origin/main", "HEAD")
    if not base or base.strip() == (_git("rev-parse", "HEAD") or "").strip():
        return None
    known = _git("diff", "--name-only", base.strip())
    unknown = _git("ls-files", "--others", "--exclude-standard")
    return None if known is None or unknown is None else frozenset((known + unknown).split())


def _git(*arguments: str) -> str | None:
    """Return what git prints, or ``None`` where it fails, as outside a clone."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout
