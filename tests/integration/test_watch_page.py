"""The pages of ``rlplug watch`` in a browser: no text becomes markup, all can be reached, and runs are followed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import quote

import chromium
import pytest
from report_runs import RUN, make_run, metric_rows, write_metrics

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(chromium.BROWSER is None, reason="needs Chromium, as Debian's package chromium has it"),
]

HOSTILE = "</script><img src=x onerror=alert(1)><b>bold</b>\x1b[31m\u202eevil\u2066\x07"
FINISHED, KILLED, LONG, NAMED = "kinds/finished", "kinds/killed", "kinds/long", "<img src=x onerror=alert(2)>\u202egnp"
BEGUN = "kinds/begun"
AXE = importlib.util.find_spec("axe_playwright_python")
"""The distribution axe-playwright-python, of which only its copy of axe-core is used."""


def make_hostile(run: Path) -> None:
    rows = metric_rows(60)
    for row in rows:
        row |= {f"reward/{HOSTILE.replace('/', '')}": 0.5, "<b>x</b>/y": 1.0, "__proto__": 1.0, "time/<i>phase": 0.2}
    make_run(run, num_steps=3)
    write_metrics(run, rows)
    texts = dict.fromkeys(("status", "message", "started", "finished", "device", "world_size"), HOSTILE)
    costs = [{"plugin": HOSTILE, "hook": HOSTILE, "phase": HOSTILE, "calls": HOSTILE, "seconds": 0.5}]
    plugin = dict.fromkeys(("name", "distribution", "version", "state", "reason"), HOSTILE)
    tables = {"batch_plan": [[HOSTILE] * 3], "memory_plan": [[HOSTILE] * 5] * 3, "effects": [HOSTILE]}
    own = {"versions": {HOSTILE: HOSTILE}, "plugins": [plugin], "memory_notes": [HOSTILE], "hook_costs": costs}
    (run / "run.json").write_text(json.dumps(texts | tables | own))
    (run / "config.yaml").write_text(json.dumps({"model": {HOSTILE: HOSTILE}}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / FINISHED, num_steps=160)
    make_run(root / LONG, num_steps=20_000)
    killed = make_run(root / KILLED, num_steps=200)
    (killed / "run.json").write_text(json.dumps({**RUN, "status": "running", "finished": None}))
    (killed / "run.lock").write_text("process 1 on elsewhere\n")
    (killed / "metrics.jsonl").write_bytes((killed / "metrics.jsonl").read_bytes()[:-100])
    (root / BEGUN).mkdir()
    (root / BEGUN / "run.json").write_text(json.dumps({**RUN, "status": "running"}))
    make_hostile(root / "kinds" / NAMED)
    return root


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    """The address of the page, served by the command until Ctrl-C, which ends it without a word."""
    with served(runs) as address:
        yield address


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Run the command on a folder, and give its address."""
    command = [sys.executable, "-m", "rlplug", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stdout.read()
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
    assert rest == ""
    assert process.returncode == 0


def browse(use: Callable[[chromium.Page], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with chromium.opened() as page:
            await use(page)
            assert page.problems == []

    asyncio.run(scenario())


@asynccontextmanager
async def at(page: chromium.Page, address: str, ready: str) -> AsyncIterator[None]:
    """Open a view, and wait until something is there."""
    await page.call("Page.navigate", url="about:blank")
    await page.call("Page.navigate", url=address)
    await page.until(ready)
    yield


def run_of(name: str) -> str:
    return f"#/run/{quote(name, safe='')}"


def comparison(*names: str) -> str:
    return f"#/compare?runs={quote(','.join(quote(name, safe='') for name in names), safe='')}"


DRAWN = "document.querySelectorAll('.plot .main-svg').length > 3"
VIEWS = {
    "runs": ("#/runs", "document.querySelectorAll('.runs tbody tr').length == 5"),
    "finished": (run_of(FINISHED), DRAWN),
    "killed": (run_of(KILLED), DRAWN),
    "begun": (run_of(BEGUN), "document.body?.innerText.includes('No step has ended yet')"),
    "20,000 steps": (run_of(LONG), DRAWN),
    "hostile": (run_of(f"kinds/{NAMED}"), DRAWN),
    "compare": (comparison(FINISHED, KILLED, LONG, f"kinds/{NAMED}"), DRAWN),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_drawn_in_any_width_and_theme_and_loads_nothing_from_elsewhere(url: str, view: str) -> None:
    hash_, ready = VIEWS[view]

    async def use(page: chromium.Page) -> None:
        for width, is_dark in ((1280, False), (400, True)):
            await page.look(width, 900, is_dark)
            async with at(page, url + hash_, ready):
                await asyncio.sleep(0.5)
                assert await page.run("document.documentElement.scrollWidth") <= width
        assert {address for address in page.requested if not address.startswith((url, "about:", "data:"))} == set()
        assert await page.run("document.querySelectorAll('main img, main b b, main i, main script').length") == 0

    browse(use)


def test_hostile_text_is_shown_as_text(url: str) -> None:
    async def use(page: chromium.Page) -> None:
        async with at(page, url + VIEWS["hostile"][0], DRAWN):
            text = await page.run("document.querySelector('main').textContent")
            assert "</script><img src=x onerror=alert(1)><b>bold</b>\\x1b[31m\\u202eevil\\u2066\\x07" in text
            assert not {"\u202e", "\u2066", "\x1b", "\x07"} & set(text)

    browse(use)


def test_a_run_that_goes_on_is_followed(url: str, runs: Path) -> None:
    run = make_run(runs / "followed", num_steps=20)
    rows = metric_rows(40)
    last = "document.querySelector('.timeline li:last-child .step')?.textContent"

    async def use(page: chromium.Page) -> None:
        async with at(page, url + run_of("followed"), f"{DRAWN} && {last} == '19'"):
            await page.run("document.querySelector('.legend button').click()")
            write_metrics(run, rows[:30])
            await page.until(f"{last} == '29'")
            assert await page.run("document.querySelector('.legend button').ariaPressed") == "false"
            (run / "run.json").write_text(json.dumps({**RUN, "status": "failed", "message": "OutOfMemoryError"}))
            await page.until("document.querySelector('.message.failed')?.textContent == 'OutOfMemoryError'")

    browse(use)
    for file in run.iterdir():
        file.unlink()
    run.rmdir()


def test_runs_are_chosen_compared_and_left_with_the_keyboard_alone(url: str) -> None:
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"

    async def use(page: chromium.Page) -> None:
        async def tab_to(name: str) -> None:
            for _ in range(60):
                await page.key("Tab", 9)
                if await page.run(focused) == name:
                    style = await page.run("getComputedStyle(document.activeElement).outlineStyle")
                    assert style != "none", f"the focus on {name} is not visible"
                    return
            pytest.fail(f"Tab never reached {name}")

        await page.look()
        async with at(page, url + VIEWS["runs"][0], VIEWS["runs"][1]):
            await tab_to(f"Choose {FINISHED}")
            await page.key(" ", 32, " ")
            await page.run("document.activeElement.blur(); window.getSelection().removeAllRanges()")
            await page.run("document.querySelector('.tools input').focus()")
            await tab_to("Compare 1")
            await page.key("Enter", 13, "\r")
            await page.until(DRAWN)
            await tab_to("rlplug watch")
            await page.key("Enter", 13, "\r")
            await page.until(VIEWS["runs"][1])
            assert await page.run("document.querySelector('.tools button').textContent") == "Compare 1"

    browse(use)


def test_controls_of_the_curves_change_what_is_drawn(url: str) -> None:
    plot = "document.querySelector('[data-metric=\"reward/mean\"] .plot')"

    async def use(page: chromium.Page) -> None:
        await page.look()
        async with at(page, url + comparison(FINISHED, KILLED), f"{plot}?.data?.length == 4"):
            await page.run("""(() => {
                const [smoothing, x, y] = document.querySelectorAll(".controls input");
                smoothing.value = 0; smoothing.dispatchEvent(new Event("input"));
                y.click();
                const axis = document.querySelector(".controls select");
                axis.value = "seconds"; axis.dispatchEvent(new Event("change"));
            })()""")
            await page.until(f"{plot}.data.length == 2 && {plot}.layout.yaxis.type == 'log'")
            await page.until(f"{plot}.layout.xaxis.title.text == 'seconds in steps' && {plot}.data[0].x.at(-1) > 1000")
            assert "axis=seconds" in await page.run("location.hash")
            await page.run("document.querySelector('.runs-legend button').click()")
            await page.until(f"{plot}.data.length == 1")
            await page.run("""(() => {
                const filter = document.querySelector(".controls input[type=search]");
                filter.value = "grad"; filter.dispatchEvent(new Event("input"));
            })()""")
            await page.until("document.querySelectorAll('main figure').length == 1")

    browse(use)


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    with served(tmp_path / "runs") as address:

        async def use(page: chromium.Page) -> None:
            async with at(page, address, "document.body?.innerText.includes('does not exist yet')"):
                os.mkdir(tmp_path / "runs")
                await page.until("document.body?.innerText.includes('holds no runs yet')")
                make_run(tmp_path / "runs/first", num_steps=5)
                await page.until("document.querySelectorAll('.runs tbody tr').length == 1")

        browse(use)


@pytest.mark.skipif(AXE is None, reason="needs axe-core: pip install --no-deps axe-playwright-python")
@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing_serious(url: str, is_dark: bool) -> None:
    assert AXE is not None
    assert AXE.origin is not None
    script = (Path(AXE.origin).parent / "axe.min.js").read_text()

    async def use(page: chromium.Page) -> None:
        await page.look(is_dark=is_dark)
        for hash_, ready in VIEWS.values():
            async with at(page, url + hash_, ready):
                await page.run(f"{script};0")
                found = await page.run("axe.run(document).then((result) => result.violations)")
                bad = [
                    (rule["id"], rule["nodes"][0]["html"])
                    for rule in found
                    if rule["impact"] in ("serious", "critical")
                ]
                assert bad == []

    browse(use)
