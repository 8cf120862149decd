"""``python -m rlplug_rollout_sglang.server_main FILE``: SGLang's ``launch_server``, with its arguments from a file."""

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
