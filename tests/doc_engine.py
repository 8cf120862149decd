"""The engine of ``rlplug new-plugin --kind engine``, with the servers of a launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

from rlplug_devkit.new_plugin.rendering import names_of, rendered_files
from transformers import AutoConfig

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = "src/rlplug_my_engine/"
ENGINE: Final = """
from my_engine import Backend, Options
from rlplug.interfaces import EngineCapabilities
from rlplug_engines.servers import ServerEngine

class LaunchedRollout(ServerEngine):
    '''Generates in servers at URLs.'''

    capabilities = EngineCapabilities(colocated=False, disaggregated=True)
    backend_class = Backend

    def __init__(self, urls: list[str] | None = None, api_key_env: str = "MY_ENGINE_KEY",
                 start_deadline_s: float = 120.0):
        super().__init__(Options(), None, urls, api_key_env, start_deadline_s, 120.0, 60.0)
"""
SERVER: Final = """
import json, sys
from pathlib import Path
from aiohttp import web
settings, host, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
own = settings.with_name(f"settings-{port}.json")
own.write_text(json.dumps(json.loads(settings.read_text()) | {"port": int(port)}))
sys.argv[1:] = [str(own)]
import my_server
run_app = web.run_app
web.run_app = lambda app, **options: run_app(app, **{**options, "host": host})
my_server.main()
"""


def write_engine(folder: Path, model: Path) -> str:
    """Write the engine's files into a folder, which must be on ``PYTHONPATH``; return the command of a server.

    The engine is ``launched_engine.LaunchedRollout``, and ``MY_ENGINE_KEY`` has its key.

    Args:
        model: Folder of the policy, which has float32 weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = rendered_files(names_of("my-engine"), "engine")
    for name in ("engine", "server"):
        (folder / f"my_{name}.py").write_text(files[f"{PACKAGE}{name}.py"])
    (folder / "launched_engine.py").write_text(ENGINE)
    (folder / "launched_server.py").write_text(SERVER)
    config = AutoConfig.from_pretrained(model)
    settings = {
        "path": str(model),
        "dtype": "float32",
        "eos_token_ids": [config.eos_token_id],
        "pad_token_id": config.pad_token_id,
        "max_context": config.max_position_embeddings,
        "max_batch_size": 256,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    return f"{sys.executable} {folder}/launched_server.py {folder}/settings.json {{host}} {{port}}"
