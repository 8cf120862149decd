"""Starts the tests' Python processes as forks of one process, which has paid for the imports of torch and Lightning.

``forked.py`` starts one of these for each test process, as ``python fork_server.py LISTENER`` with the descriptor of a
listening Unix socket. When its stdin closes, it ends its processes and removes the socket's folder. A connection asks
for one process with a line of JSON::

    {"command": ["script.py", "argument"], "env": {...}, "cwd": "/", "stdout": "file", "stderr": "file"}

and gets the lines ``{"pid": 17}`` and, at its end, ``{"exit_code": 0}`` (minus the number of the signal that ended it).
Each process leads a session of its own; closing the connection kills its whole process group.

What libraries read while they are imported is the same for all: one thread of OpenMP, and no network for the hub. So
are the seed of ``hash`` and the modules that are imported: a test of those, or of a plugin that is blocked, needs
``subprocess``.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "numpy",
    "pytest",
    "torch.utils.tensorboard",
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "lightning.pytorch.strategies.model_parallel",
    "lightning.pytorch.profilers",
    "accelerate",
    "aiohttp.web",
    "plotly.offline",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "rlplug.cli.lightning_cli",
    "rlplug_plan.command",
    "rlplug.models.export",
)
"""Modules that take time, beside the classes of the installed plugins."""
TITAN_MODELS = ("llama3", "qwen3")
"""Models of TorchTitan, which its plugin imports when it builds one."""
VARIABLES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def import_all() -> None:
    """Import what processes need, and check that no import has left a thread, which a fork would lose."""
    for module in IMPORTED:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:  # not every environment has all of them
            importlib.import_module(module)
    importlib.import_module("rlplug.plugin_manager").PluginManager().registry.import_all()
    if importlib.util.find_spec("torchtitan") is not None:
        for model in TITAN_MODELS:
            importlib.import_module("rlplug_trainer_titan.library").titan(f"models.{model}")
    (num_threads,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Threads")]
    assert num_threads.split()[1] == "1", f"the fork server has more than one thread ({num_threads})"
    gc.freeze()


class Child:
    """A process that was asked for, and the connection that asked."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.has_ended = False

    def report(self) -> None:
        """Say how the process ended, if it has; it stays a zombie, so that its number names nothing else."""
        if self.has_ended:
            return
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is not None:
            self.has_ended = True
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            _send(self.connection, {"exit_code": code})

    def end(self) -> None:
        """Kill the process group, and forget the process."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it was not its own group's leader yet, or all of the group have ended
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


class Server:
    """Forks a process for each connection until stdin closes."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.children: dict[socket.socket, Child] = {}
        self.path = sys.path[1:]  # without the folder of this script
        self.woken, wake = os.pipe()
        for end in (self.woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, whose end closes stdin
        self.selector = selectors.DefaultSelector()
        for source in (listener, self.woken, sys.stdin):
            self.selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is sys.stdin:
                    for child in self.children.values():
                        child.end()
                    return
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fileobj == self.woken:
                    os.read(self.woken, 4096)
                    for child in self.children.values():
                        child.report()
                else:
                    self.close(key.fileobj)  # type: ignore[arg-type]

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        with connection.makefile("r") as lines:
            job = json.loads(lines.readline())
        pid = os.fork()
        if pid == 0:
            self.become(job)
        self.children[connection] = Child(pid, connection)
        self.selector.register(connection, selectors.EVENT_READ)
        _send(connection, {"pid": pid})

    def close(self, connection: socket.socket) -> None:
        """Nothing more is said on a connection: it can be read because it was closed."""
        self.selector.unregister(connection)
        self.children.pop(connection).end()

    def become(self, job: dict[str, Any]) -> NoReturn:
        """Turn this fork into the process that was asked for, and end as that does."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            for descriptor, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                os.dup2(file, descriptor)
                os.close(file)
            os.environ.clear()
            os.environ.update(job["env"])
            os.chdir(job["cwd"])
            random.seed()
            sys.modules["numpy"].random.seed()
            code = run_python(job["command"], self.path)
        except KeyboardInterrupt:
            traceback.print_exc()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:  # noqa: BLE001 - a child must not return into the server's loop
            traceback.print_exc()
        finally:
            try:
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


def run_python(command: list[str], path: list[str]) -> int:
    """Run what ``python *command`` would, and return the exit code: ``script ...``, ``-m module ...``, ``-c code``."""
    what, *arguments = command
    sys.argv = [what, *arguments]
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [str(Path(what).resolve().parent) if what[0] != "-" else "", *folders, *path]
    try:
        if what == "-m":
            sys.argv = arguments
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            if what == "-c":
                sys.argv = ["-c", *arguments[1:]]
                source, name = arguments[0], "<string>"
            else:
                source, name = Path(what).read_text(), what
                main.__file__ = what
            exec(compile(source, name, "exec"), main.__dict__)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    return 0


def _send(connection: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):  # it was closed, which the next turn of the loop reads
        connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[1]))
    folder = Path(listener.getsockname()).parent
    import_all()
    Server(listener).run()
    shutil.rmtree(folder)
