"""``rlplug watch``: serve the page that follows and compares runs, until Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Final

from rlplug.errors import ConfigError
from rlplug.observability.terminal import say

LARGEST_PORT: Final = 65535
PORT: Final = 6006
"""TensorBoard's port, so that a tunnel or a bookmark made for it works."""
DESCRIPTION: Final = """Follow runs as they go and compare them, on a page of this machine.

The page reads the files of run folders, so it shows running, finished and killed runs alike, of this machine or copied
from another. It writes nothing and needs no network. From another machine: ssh -L 6006:localhost:6006 HOST."""


def watch_command(arguments: list[str]) -> None:
    """Follow runs as they go, and compare them, on a local page: runs.

    Raises:
        ConfigError: The folder is a file, the port is taken or out of range, the host is not this machine's, or plotly
            is missing.
    """
    options = make_parser().parse_args(arguments)
    folder: Path = options.runs_dir
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give the folder of your runs, such as runs, or of one run.")
    if not 0 <= options.port <= LARGEST_PORT:
        raise ConfigError(f"--port {options.port}: give a port from 1 to {LARGEST_PORT}, or 0 for any that is free.")
    from aiohttp import web

    from rlplug_watch.hosts import is_loopback
    from rlplug_watch.page.folders import Runs
    from rlplug_watch.page.server import make_app

    app = make_app(folder, options.host)
    listening = _listen(options.host, options.port)
    port = listening.getsockname()[1]
    url = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{port}/"
    if not is_loopback(options.host):
        say(
            f"rlplug: warning: --host {options.host} lets every machine that reaches this one read all runs below "
            f"{folder}, prompts and completions too: there is no password. Without --host only this machine can.",
            wraps=True,
        )
    count = len(Runs(folder).all())
    there = (
        f"{count} run{'' if count == 1 else 's'} below {folder}" if folder.exists() else f"{folder} does not exist yet"
    )
    say(f"{there}; Ctrl-C ends this page: {url}")
    sys.stdout.flush()
    if options.open:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    web.run_app(app, sock=listening, access_log=None, print=None, shutdown_timeout=1.0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "rlplug watch", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_of_folder = "folder with run folders at any depth, or one run's folder (default: runs)"
    parser.add_argument("runs_dir", type=Path, nargs="?", default=Path("runs"), help=help_of_folder)
    help_of_port = f"port of the page (default: {PORT}, as TensorBoard's); 0 takes any that is free"
    parser.add_argument("--port", type=int, default=PORT, help=help_of_port)
    help_of_host = "address to listen on (default: 127.0.0.1, this machine alone); the page has no password"
    parser.add_argument("--host", default="127.0.0.1", help=help_of_host)
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    return parser


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken, perhaps by TensorBoard or another rlplug watch: give another one, "
                f"such as --port {port + 1}, or --port 0 for any that is free."
            ) from error
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on ({error}): give an address of this machine and a port "
            "from 1024 to 65535."
        ) from error
