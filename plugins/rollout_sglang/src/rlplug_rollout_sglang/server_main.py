"""Runs one of SGLang's servers.

``python -m rlplug_rollout_sglang.server_main ARGUMENTS.json`` does what ``python -m sglang.launch_server`` does, with
the arguments of ``ServerArgs`` from a file: they are not on the command line, which every user of the host can read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Serve until the process is told to end."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # first: they add to what arguments may be
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**json.loads(Path(sys.argv[1]).read_text())))


if __name__ == "__main__":
    main()
