"""Every code block of the documentation is run, at a reduced size, or checked; ``documentation.py`` says how."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT
from documentation import PAGES, Block, Reader, Step, blocks_of, carry_out, commands_of, make_stand_in

from rlplug import hookspecs

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
REFERENCE = "scripts/write_configuration_reference.py"
GUIDES = "docs/api/guides.md"


ON_EVERY_PUSH = ("README.md", "docs/first-run.md", "docs/the-step.md")
"""Pages whose commands all run in ``make test``; of the others, what prints a configuration or only is checked."""
LOGGING = (*ON_EVERY_PUSH, "docs/algorithms.md", "docs/environments.md")
"""Pages whose runs log every metric there is, but for those of ``LOGGED_ELSEWHERE``."""
LOGGED_ELSEWHERE = {
    "partial/on_arrival_batches": "test_streamed_runs.py",
    "partial/overlap_s": "test_streamed_runs.py",
    "router/differ": "test_experts.py",
    "throughput/mfu": "test_gpu_use.py",
}
"""Metrics of runs that no page shows, and the tests that see them."""


class Followed:
    """All pages with their steps planned; a step runs when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stand_in = make_stand_in(folder / "stand-in")
        self.readers = {page: Reader(folder / page.replace("/", "-"), stand_in) for page in PAGES}
        self.steps: dict[Block, list[Step]] = {}
        self.problems: dict[Block, str] = {}
        self.num_run = 0
        for block in BLOCKS:
            try:
                self.steps[block] = self.readers[block.page].follow(block)
            except (ValueError, SyntaxError) as problem:
                self.problems[block] = str(problem)

    def run(self, step: Step) -> Step:
        if step.exit_code is None:
            self.num_run += 1
            carry_out(step, self.folder / f"{self.num_run}.log")
        return step

    def run_block(self, block: Block) -> list[Step]:
        """Run a block's steps, after those of the page that come before them and may matter to them."""
        steps = self.steps[block]
        if not all(step.only_prints for step in steps):
            for former in itertools.takewhile(lambda former: former != block, blocks_of(block.page)):
                for step in self.steps.get(former, []):
                    self.run(step)
        return [self.run(step) for step in steps]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    return Followed(tmp_path_factory.mktemp("docs"))


def is_nightly(block: Block) -> bool:
    """Whether a block has commands of the long kind, on a page that is not in the sample."""
    commands = commands_of(block.text) if block.language == "bash" else []
    runs = block.language == "python" or any(
        re.search(
            r"\brlplug (fit|validate|launch|plan|plugins|report|eval|doctor)|pip install.*/|^pytest|-m pytest", command
        )
        and "--print_config" not in command
        for command in commands
    )
    return runs and block.page not in ON_EVERY_PUSH


def by_length(block: Block) -> Any:
    return pytest.param(block, id=str(block), marks=[pytest.mark.nightly] if is_nightly(block) else [])


@pytest.mark.parametrize("block", map(by_length, BLOCKS))
def test_block(followed: Followed, block: Block) -> None:
    assert block not in followed.problems, followed.problems[block]
    for step in followed.run_block(block):
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


@pytest.mark.parametrize("is_stale", [False, True])
def test_the_configuration_reference_is_what_the_code_says(followed: Followed, is_stale: bool) -> None:
    page = followed.folder / "configuration.md"
    text = (ROOT / "docs/configuration.md").read_text()
    page.write_text(text.replace("- `clip_low` ", "- `clipping` ") if is_stale else text)
    step = followed.run(Step("python", [REFERENCE, "--check", str(page)], str(ROOT), str(followed.folder / "none")))

    assert step.exit_code == int(is_stale), step.output
    assert ("make docs" in step.output) == is_stale


@pytest.mark.parametrize(
    "pages", [pytest.param(ON_EVERY_PUSH, id="some"), pytest.param(LOGGING, id="all", marks=pytest.mark.nightly)]
)
def test_every_metric_is_explained_and_every_explained_one_is_logged(
    followed: Followed, pages: tuple[str, ...]
) -> None:
    page = (ROOT / "docs/the-step.md").read_text().partition("## Metrics")[2]
    explained = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    patterns = {name: re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in explained}
    logged: set[str] = set()
    for name in pages:
        for block in blocks_of(name):
            followed.run_block(block)
        for file in (followed.readers[name].folder / "runs").glob("*/*/metrics.jsonl"):
            logged |= {name for line in file.read_text().splitlines() for name in json.loads(line)} - {"step"}

    assert len(logged) > 40
    assert not [name for name in logged if not any(pattern.fullmatch(name) for pattern in patterns.values())]
    if pages == LOGGING:
        missing = {name for name, pattern in patterns.items() if not any(pattern.fullmatch(n) for n in logged)}
        assert missing == LOGGED_ELSEWHERE.keys()


def test_the_table_of_hooks_has_every_hook_and_its_arguments() -> None:
    page = (ROOT / "docs/writing-a-plugin.md").read_text()
    rows = re.findall(r"^\| `(rlplug_\w+)` \([\d.]+\) \| \w+ \| ([^|]+) \|", page, re.M)
    kinds = re.findall(r"`(\w+)` \([\d.]+\)", re.findall(r"Kinds: (.*)\.$", page, re.M)[0])
    specified = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("rlplug_")}

    documented = {name: re.findall(r"`(\w+)`", arguments) for name, arguments in rows}
    documented |= {f"rlplug_register_{kind}": ["registry"] for kind in kinds}
    assert documented == {name: list(inspect.signature(hook).parameters) for name, hook in specified.items()}


def test_what_guides_name_is_here_or_is_said_not_to_be() -> None:
    """Catches a row without a link, which no other test of links sees, and one that is there twice."""
    rows = re.findall(r"^\| (?!what guides name)([^|]+) \| ([^|]+) \|$", (ROOT / GUIDES).read_text(), re.M)
    assert len({topic for topic, _ in rows}) == len(rows)
    assert len([here for _, here in rows if not here.startswith("no")]) >= 80
    assert not [topic for topic, here in rows if "](" not in here]


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", GUIDES])
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
