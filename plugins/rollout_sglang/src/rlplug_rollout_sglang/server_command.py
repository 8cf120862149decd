"""The command that starts one of SGLang's servers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from rlplug.rollout.servers.addresses import LOOPBACK
from rlplug.rollout.servers.processes import Launch, ServerSlot
from rlplug_rollout_sglang.options import ENVIRONMENT

STREAM_INTERVAL: Final = 8
"""Tokens that a server sends at once to a request that was submitted. An abort loses those that wait to be sent."""


def launch(arguments: Mapping[str, Any], place: ServerSlot) -> Launch:
    """Return how a server is started.

    Args:
        arguments: Of SGLang's ``ServerArgs``, by name.
    """
    here = {
        "host": LOOPBACK,
        "port": place.port,
        "api_key": place.key,
        "incremental_streaming_output": True,  # else each event has all tokens so far
    }
    file = place.folder / f"arguments-{place.port}.json"
    file.write_text(json.dumps({"stream_interval": STREAM_INTERVAL} | dict(arguments) | here))
    environment = {
        **ENVIRONMENT,
        # where it is not set, SGLang turns it off, and both ends of the weights' group must agree: NCCL's default
        "NCCL_CUMEM_ENABLE": os.environ.get("NCCL_CUMEM_ENABLE", "-2"),
    }
    return Launch([sys.executable, "-m", "rlplug_rollout_sglang.server_main", str(file)], environment)
