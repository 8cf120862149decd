"""Chromium without a window, driven over the DevTools protocol, to look at pages as a reader would."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
START_S = 60
ANSWER_S = 60


class Page:
    """A tab: what it loads, shows and complains about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        """Errors of scripts, refusals by the policy of the page, and requests that failed, in their order."""
        self.requested: list[str] = []
        """Addresses that the page asked for."""

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._waiting.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:2000])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.problems.append(event["params"]["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requested.append(event["params"]["request"]["url"])
            elif event["method"] == "Page.javascriptDialogOpening":
                self.problems.append("a dialog opened")
                await self._socket.send_json(
                    {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
                )

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        result = await asyncio.wait_for(answer, ANSWER_S)
        if "error" in result:
            raise RuntimeError(f"{method}: {result['error']}")
        value: dict[str, Any] = result["result"]
        return value

    async def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript, awaited where it is a promise."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 120) -> Any:
        """Wait until an expression is true, and return its value."""
        for _ in range(int(seconds * 10)):
            if value := await self.run(script):
                return value
            await asyncio.sleep(0.1)
        raise TimeoutError(f"{script} is not true after {seconds} s; problems: {self.problems}")

    async def key(self, key: str, code: int = 0, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            shown = {"text": text} if kind == "keyDown" and text else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **shown)

    async def look(self, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Give the window a size and a theme."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def screenshot(self, path: Path, whole: bool = False) -> None:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def opened() -> AsyncIterator[Page]:
    """Start Chromium, and end it with its profile."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            BROWSER,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port_of(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = await answer.json(content_type=None)
                address = next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for domain in ("Runtime", "Log", "Network", "Page"):
                        await page.call(f"{domain}.enable")
                    yield page
                    listening.cancel()
        finally:
            process.kill()
            await process.wait()


async def _port_of(file: Path) -> int:
    for _ in range(START_S * 10):
        if file.exists() and (text := file.read_text()).count("\n"):
            return int(text.splitlines()[0])
        await asyncio.sleep(0.1)
    raise TimeoutError(f"Chromium has not started in {START_S} s")
