"""vLLM's own OpenAI server, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("`make test-vllm` installs vLLM", allow_module_level=True)

START_S = 600
KEY = "sk-of-this-test"
SMOLLM2 = Path(os.environ.get("SMOLLM2") or Path(__file__).parents[3] / "models/SmolLM2-135M-Instruct")
"""Folder of SmolLM2-135M-Instruct."""


@contextmanager
def vllm_api(model: Path, name: str, folder: Path, *options: str) -> Iterator[str]:
    """Serve a model under a name while the body runs, and yield the server's address; its log is in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *address, *options]
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with open(folder / "log.txt", "w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=variables)
    try:
        ends_at = time.monotonic() + START_S
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < ends_at, (folder / "log.txt").read_text()[-3000:]  # noqa: PT018
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
