"""The pages of samples, groups and tokens in a browser: hostile texts stay texts, and the keyboard reaches all."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import chromium
import pytest
from aiohttp.test_utils import TestServer
from rlplug_watch.page.server import make_app
from sampled_runs import write_run

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(chromium.BROWSER is None, reason="needs Chromium, as Debian's package chromium has it"),
]
AXE = importlib.util.find_spec("axe_playwright_python")
RUN = "#/run/a%2F001"
VIEWS = {
    "samples": (f"{RUN}/samples?sort=oldest", "document.querySelectorAll('.sample-entry').length == 14"),
    "group": (f"{RUN}/samples?step=1&phase=train&group=0", "document.querySelectorAll('.sample-entry').length == 4"),
    "tokens": (f"{RUN}/tokens/2/0.0", "document.querySelectorAll('.token-text .tok').length == 6"),
}


def browse(folder: Path, use: Callable[[chromium.Page, str], Awaitable[None]]) -> None:
    write_run(folder / "a" / "001")

    async def scenario() -> None:
        async with TestServer(make_app(folder)) as server, chromium.opened() as page:
            await use(page, str(server.make_url("/")))
            assert page.problems == []

    asyncio.run(scenario())


async def visit(page: chromium.Page, address: str, ready: str) -> None:
    await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
    await page.call("Page.navigate", url="about:blank")
    await page.call("Page.navigate", url=address)
    await page.until(ready)


@pytest.mark.parametrize("view", VIEWS)
def test_a_hostile_run_is_shown_as_text_in_any_width_and_theme(tmp_path: Path, view: str) -> None:
    hash_, ready = VIEWS[view]

    async def use(page: chromium.Page, url: str) -> None:
        for width, is_dark in ((1280, False), (400, True)):
            await page.look(width, 900, is_dark)
            await visit(page, url + hash_, ready)
            assert await page.run("document.documentElement.scrollWidth") <= width
            assert await page.run("document.querySelectorAll('main script, main b[onclick]').length") == 0
            assert "taken" not in await page.run("document.title")
            assert await page.run("/[\\u202a-\\u202e\\u2066-\\u2069\\x1b]/.test(document.body.innerText)") is False
            if AXE is not None and AXE.origin is not None:
                await page.run((Path(AXE.origin).parent / "axe.min.js").read_text() + ";0")
                found = json.loads(await page.run("axe.run().then(r => JSON.stringify(r.violations))"))
                serious = [rule for rule in found if rule["impact"] in ("serious", "critical")]
                assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in serious] == []

    browse(tmp_path, use)


def test_tokens_are_read_with_the_keyboard(tmp_path: Path) -> None:
    async def use(page: chromium.Page, url: str) -> None:
        await visit(page, url + VIEWS["tokens"][0], VIEWS["tokens"][1])
        assert await page.run("document.querySelectorAll('.token-text .tok[tabindex=\"0\"]').length") == 1
        await page.run("document.querySelector('.token-text .tok').focus()")
        assert "ratio\n0.7407" in await page.run("document.querySelector('.numbers').innerText")
        await page.key("ArrowRight", 39)
        await page.key("ArrowRight", 39)
        assert "observation of the environment" in await page.run("document.querySelector('.numbers').innerText")
        await page.key("End", 35)
        assert "produced, not trained" in await page.run("document.querySelector('.numbers').innerText")
        assert await page.run("document.querySelectorAll('.token-text .clipped').length") == 3
        assert await page.run("[...document.querySelectorAll('.version')].map(e => e.innerText).slice(0, 2)") == [
            "v0",
            "v1",
        ]

    browse(tmp_path, use)


def test_a_search_narrows_the_list_and_the_address(tmp_path: Path) -> None:
    async def use(page: chromium.Page, url: str) -> None:
        await visit(page, url + VIEWS["samples"][0], VIEWS["samples"][1])
        script = "const s = document.querySelector('[name=query]'); s.value = 'ALERT(1)';"
        await page.run(f"(() => {{ {script} s.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()")
        await page.until("document.querySelectorAll('.sample-entry').length == 1")
        assert "1 found; searched 14 of 14" in await page.run("document.querySelector('.sample-state').innerText")
        assert "query=ALERT" in await page.run("location.hash")

    browse(tmp_path, use)
