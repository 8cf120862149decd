"""Every code block of the documentation is run, at a reduced size, or checked; ``documentation.py`` says how."""

from __future__ import annotations

import csv
import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import ROOT
from documentation import PAGES, Block, Reader, Step, blocks_of, carry_out, make_stand_in

from rlplug import hookspecs

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
REFERENCE = "scripts/write_configuration_reference.py"


@dataclass
class Followed:
    """What came of following all pages."""

    readers: dict[str, Reader]
    steps: dict[Block, list[Step]]
    problems: dict[Block, str]
    reference: Step
    stale_reference: Step
    folder: Path


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Plan all blocks, and run the steps in two processes, each of which pays once for the imports."""
    folder = tmp_path_factory.mktemp("docs")
    stand_in = make_stand_in(folder / "stand-in")
    readers = {page: Reader(folder / page.replace("/", "-"), stand_in) for page in PAGES}
    steps: dict[Block, list[Step]] = {}
    problems: dict[Block, str] = {}
    for block in BLOCKS:
        try:
            steps[block] = readers[block.page].follow(block)
        except (ValueError, SyntaxError) as problem:
            problems[block] = str(problem)
    stale = folder / "stale.md"
    stale.write_text((ROOT / "docs/configuration.md").read_text().replace("| `clip_low` |", "| `clipping` |"))
    site = str(folder / "no-plugins")
    reference = Step("python", [REFERENCE, "--check"], str(ROOT), site)
    stale_reference = Step("python", [REFERENCE, "--check", str(stale)], str(ROOT), site)
    halves = in_halves(steps)
    halves[1].extend([reference, stale_reference])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(carry_out, halves, [folder / "first half", folder / "second half"]))
    return Followed(readers, steps, problems, reference, stale_reference, folder)


def in_halves(steps: dict[Block, list[Step]]) -> tuple[list[Step], list[Step]]:
    """Split the steps between pages, so that each half has about as many."""
    by_page: dict[str, list[Step]] = {page: [] for page in PAGES}
    for block, part in steps.items():
        by_page[block.page] += part
    halves: tuple[list[Step], list[Step]] = ([], [])
    for part in sorted(by_page.values(), key=len, reverse=True):
        min(halves, key=len).extend(part)
    return halves


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block(followed: Followed, block: Block) -> None:
    assert block not in followed.problems, followed.problems[block]
    for step in followed.steps[block]:
        assert step.exit_code == step.expected_code, f"{step.kind} {step.arguments}\n{step.output[-3000:]}"
        assert step.expected_output in " ".join(step.output.split()), step.output[-3000:]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_the_reader_writes_is_used(followed: Followed, page: str) -> None:
    assert not followed.readers[page].unused


def test_most_blocks_are_run(followed: Followed) -> None:
    """A reader who plans nothing would pass every other test."""
    commands = [block for block in BLOCKS if block.language == "bash"]
    run = [block for block in commands if followed.steps.get(block)]

    assert len(run) > 0.6 * len(commands) > 12


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("rust", "fn main() {}", "no rule for 'rust'"),
        ("", "rlplug fit", "no rule for ''"),
        ("bash", "curl example.org", "no rule for the command"),
        ("bash", "make no-such-target", "no-such-target"),
        ("bash", "pip install 'rlplug[nothing]'", "no extra nothing"),
        ("bash", "pip install something-else", "the distributions here"),
        ("toml", "= 1", "Invalid"),
        ("python", "def", "invalid syntax"),
    ],
)
def test_a_block_without_a_rule_is_an_error(tmp_path: Path, language: str, text: str, message: str) -> None:
    with pytest.raises((ValueError, SyntaxError), match=message):
        Reader(tmp_path / "page", tmp_path).follow(Block("page.md", 1, language, f"{text}\n"))


def test_the_configuration_reference_is_what_the_code_says(followed: Followed) -> None:
    assert followed.reference.exit_code == 0, followed.reference.output
    assert followed.stale_reference.exit_code == 1
    assert "make docs" in followed.stale_reference.output


def test_every_metric_is_explained_and_every_explained_one_is_logged(followed: Followed) -> None:
    page = (ROOT / "docs/the-step.md").read_text().partition("## Metrics")[2]
    explained = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    patterns = {name: re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in explained}
    logged: set[str] = set()
    for name in ("README.md", "docs-first-run.md", "docs-the-step.md", "docs-algorithms.md", "docs-environments.md"):
        for file in (followed.folder / name / "runs").glob("*/*/metrics.csv"):
            with file.open(newline="") as lines:
                logged |= set(next(csv.reader(lines))) - {"step"}

    assert not [name for name in logged if not any(pattern.fullmatch(name) for pattern in patterns.values())]
    assert not [name for name, pattern in patterns.items() if not any(pattern.fullmatch(n) for n in logged)]


def test_the_table_of_hooks_has_every_hook_and_its_arguments() -> None:
    page = (ROOT / "docs/writing-a-plugin.md").read_text()
    rows = re.findall(r"^\| `(rlplug_\w+)` \| \w+ \| ([^|]+) \|", page, re.M)
    specified = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("rlplug_")}

    documented = {name: re.findall(r"`(\w+)`", arguments) for name, arguments in rows}
    assert documented == {name: list(inspect.signature(hook).parameters) for name, hook in specified.items()}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path), target


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
