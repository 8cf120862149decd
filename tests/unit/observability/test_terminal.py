"""Nothing that a text says is obeyed by rich or by the terminal, whichever function prints it."""

from __future__ import annotations

import ast
import io
import os
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from rlplug.cli.main import main
from rlplug.observability import terminal
from rlplug.observability.terminal import (
    guarded,
    invocation,
    make_table,
    say,
    show,
    start_live,
    styled,
    visible,
)
from rlplug.recording import run_output
from rlplug.types import Prompt, Sample

ROOT = Path(__file__).parents[3]
MAY_IMPORT_RICH = {"rlplug/observability/terminal.py", "rlplug/observability/progress.py"}

PIECES = [
    *("[/INST]", "[x for x in y]", "[bold]", "[link=http://evil.example]", ":smile:", "[/]", "\\[", "]", "{0}", "%s"),
    *("\x1b[2J", "\x1b]0;title\x07", "\x1b[8m", "\x9b31m", "\x1b", "\r", "\b", "\x00", "\x7f", "\x85", "\x0c"),
    *("\u202e", "\u2066", "\u200f", "\u2028", "\ufeff", "\U000e0041", "\u200d", "\u0301"),
    *("\ud800", "\udcff", "漢字", "👩‍👩‍👧", "שלום", "ｱ", "\t", "\n", " ", "plain"),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=6).map("".join)


def harmless(text: str) -> bool:
    """Return whether a terminal would print each character of ``text`` and obey none; line feeds lay out tables."""
    return not any(
        unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(letter) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        for letter in text.replace("\n", "")
    )


def sample_of(text: str) -> Sample:
    prompt = Prompt(uid=text, token_ids=(1,), text=text, answer=text)
    return Sample(prompt, 0, (1, 2), (False, True), (0.0, 0.0), text, "stop", 0, reward=1.0)


PRINTERS: dict[str, Callable[[str], None]] = {
    "say": say,
    "say wrapped": lambda text: say("x ", (text, "bold red"), wraps=True),
    "table": lambda text: show(make_table(("a", text), [(text, "b"), ("c", text)], text)),
    "totals": lambda text: show(make_table(("a", text), [(text, "b"), ("c", text)], text, num_totals=1)),
    "print": print,
    "stderr": lambda text: print(text, file=sys.stderr),
    "samples": lambda text: run_output.print_samples([sample_of(text)], step=1),
    "batch plan": lambda text: run_output.print_batch_plan([(text, text, text)], text),
    "validation": lambda text: run_output.print_validation({text: 1.0}, Path(text.replace("\x00", ""))),
}


def printed(function: Callable[[str], None], text: str, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what ``function`` writes to a stdout and stderr in UTF-8 that are no terminals."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        with guarded():
            function(text)
        stream.flush()
    return raw.getvalue().decode()


@pytest.mark.parametrize("name", PRINTERS)
@settings(max_examples=40)
@given(text=TEXTS, width=st.sampled_from([20, 80, 100]))
@example(text="[/INST]", width=80)
@example(text="\x1b[2J\udc80\u202e漢", width=20)
def test_no_text_is_obeyed_whoever_prints_it(name: str, text: str, width: int) -> None:
    """Catches a function that prints a text as markup, raw, or in a way that raises."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        shown = printed(PRINTERS[name], text, width, monkeypatch)
    if name in ("print", "stderr"):  # bars of downloads need a carriage return, and tables of others a tab
        shown = shown.replace("\r", "").replace("\t", "")
    assert harmless(shown)
    if name in ("table", "totals", "samples", "batch plan"):
        boxes = [line for line in shown.split("\n") if line[:1] in "┏┃┡│└├"]
        assert len({cell_len(line) for line in boxes if line}) == 1, "the lines of a table are equally wide"


@settings(max_examples=200)
@given(text=TEXTS)
def test_nothing_vanishes(text: str) -> None:
    """Catches a filter that drops what it does not show: an escape of each hidden character is there."""
    shown = visible(text)
    assert harmless(shown.replace("\t", ""))
    kept = [letter for letter in text if letter in shown]
    assert len(shown) >= len(text)
    assert all(letter in kept or letter.encode("unicode_escape").decode() in shown for letter in text)
    assert styled(shown).plain == shown.expandtabs(4)


def test_brackets_and_backslashes_are_shown_as_they_are() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for text in ("[/INST]", "[x for x in y]", "[bold]b[/bold]", "\\[", ":smile:", "[red]"):
            assert printed(say, text, 80, monkeypatch) == f"{text}\n"


def test_an_error_that_quotes_a_text_does_not_obey_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["[/x]\x1b[2J\u202e\udc80"]) == 2
    message = capsys.readouterr().err
    assert "there is no command" in message
    assert harmless(message)


def test_an_unforeseen_error_is_filtered_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback that the interpreter prints itself, after the filter has gone."""

    def fails(*_: object) -> None:
        raise RuntimeError("completion: \x1b[2J")

    monkeypatch.setattr("rlplug.cli.main._run", fails)
    assert main(["plugins"]) == 1
    message = capsys.readouterr().err
    assert "RuntimeError: completion: \\x1b[2J" in message
    assert harmless(message)


def test_whatever_is_written_appears_above_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a writer that breaks the display: two libraries that move the cursor of one terminal."""
    out = io.StringIO()
    with guarded():
        monkeypatch.setattr(terminal, "_console", Console(file=out, force_terminal=True, width=40, markup=False))
        start_live(Live("the display", console=terminal.console(), auto_refresh=False))
        for index in range(3):
            print(f"log {index}", file=sys.stderr)
            print("part ", end="")
            print("10%\r20%\rline")
            show(make_table(("title",), [(f"cell {index}",)], "table"))
    pyte = pytest.importorskip("pyte")
    screen = pyte.Screen(40, 60)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert lines[-1] == "the display"
    assert lines.count("the display") == 1
    assert [line for line in lines if line.startswith("log")] == ["log 0", "log 1", "log 2"]
    assert lines.count("line") == 3
    assert not screen.cursor.hidden


def test_rich_is_imported_in_one_place() -> None:
    """Catches a second console, with markup on or on the terminal of the first, and tqdm beside rich."""
    files = [*(ROOT / "rlplug").rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]
    assert len(files) > 100
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if {"rich", "tqdm"} & {name.partition(".")[0] for name in names}:
                found.add(str(path.relative_to(ROOT)))
    assert found == MAY_IMPORT_RICH


def test_a_printed_command_can_be_typed_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ``rlplug ...`` after ``make quickstart``, where the shell finds no ``rlplug``."""
    script = tmp_path / "my env" / "bin" / "rlplug"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    for argument, path, typed in [
        (str(script), "/nowhere", "'my env/bin/rlplug'"),
        (str(script), str(script.parent), "rlplug"),
        (str(ROOT / "rlplug" / "__main__.py"), "/nowhere", f"{os.path.relpath(sys.executable)} -m rlplug"),
    ]:
        monkeypatch.setattr(sys, "argv", [argument])
        monkeypatch.setenv("PATH", path)
        assert invocation() == typed
