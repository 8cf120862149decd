"""The engine in a child process of docs/writing-an-engine.md, as a module that can be imported."""

from __future__ import annotations

import atexit
import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "writing-an-engine.md"


def import_worker_engine() -> Any:
    """Return the page's ``worker_engine``; child processes can import it too."""
    if "worker_engine" not in sys.modules:
        folder = tempfile.mkdtemp(prefix="rlplug-docs-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (block,) = re.findall(r"^```python\n# my-worker/worker_engine\.py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
        Path(folder, "worker_engine.py").write_text(block)
        sys.path.append(folder)
    return importlib.import_module("worker_engine")
