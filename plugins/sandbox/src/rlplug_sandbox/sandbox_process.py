"""Program of a worker that runs tools: a script of the standard library alone, started by ``sandbox.py``.

It imports the functions once. Each call then runs in a process forked from it, which limits itself and is ended with
everything that it started. Requests and replies are lines of JSON; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pkgutil
import random
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rlplug_sandbox import sandbox_files as files
    from rlplug_sandbox import sandbox_isolation as isolation
    from rlplug_sandbox import sandbox_limits as limits
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import sandbox_files as files  # an import as part of rlplug would load torch, with its memory
    import sandbox_isolation as isolation
    import sandbox_limits as limits

FILE_LIMIT_BYTES = 16 * 2**20
MOST_FILES = 256
"""Files that a process of a call may have open: the buffers of sockets and pipes are memory that no limit counts."""
TOTAL = 2
"""Memory of all processes of a call, in limits of one process."""
FULL = b"full"
POLL_S = 0.1
IDLE_POLL_S = 1.0
ROOT_NEEDS = (
    "as root, this needs the capabilities CAP_SETUID, CAP_SETGID and, where others may not read the folders of Python "
    "and of the functions, CAP_DAC_READ_SEARCH: give the container those, or run as another user"
)
END_S = 5.0
"""Longest time in seconds until killed processes are gone."""


def main() -> None:
    """Answer requests until the trainer closes the pipe or ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the exit ends the processes of a call
    replies = os.dup(1)
    os.dup2(2, 1)  # printed text of a module must not mix with the replies

    def reply(message: dict[str, Any]) -> None:
        os.write(replies, json.dumps(message).encode() + b"\n")

    trainer = int(sys.argv[1])
    limits.adopt_orphans()  # orphans of a call become children of this process, which ends them
    try:
        worker = Worker(json.loads(sys.stdin.buffer.readline()), trainer, replies)
        first = worker.probe()
    except Exception as error:  # noqa: BLE001 - a module's own code may raise anything
        first = {"failure": describe(error)}
    reply(first)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    while (
        "failure" not in first and os.getppid() == trainer
    ):  # the pipe may be open in other children of a dead trainer
        if poller.poll(IDLE_POLL_S * 1000):
            line = sys.stdin.buffer.readline()
            if not line:
                return
            reply(worker.run(json.loads(line)))


class Worker:
    """Worker that runs one call at a time, each in a process of its own."""

    def __init__(self, settings: dict[str, Any], trainer: int, replies: int) -> None:
        self.settings, self.trainer, self.replies = settings, trainer, replies
        sys.path[:] = settings["module_path"]
        self.functions: dict[str, Callable[..., Any]] = {
            path: pkgutil.resolve_name(path) for path in settings["functions"]
        }
        folders = settings["folders"]
        self.paths = None if folders is None else files.visible_paths(folders)
        if limits.descendants():
            raise RuntimeError("importing the functions started a process: start it in a call instead")
        self.user = limits.own_user(os.getpid())
        self.has_namespaces = self.has_filter = True
        self.has_landlock = False
        self.walls: set[str] = set()

    def probe(self) -> dict[str, Any]:
        """Find the isolation that this machine allows; return it as text, or a failure if calls cannot run at all.

        Which walls stand, a call has tried.
        """
        problem, reply = "", {"failure": ""}
        filters = (True, False) if isolation.can_filter() else (False,)
        ways = [(True, False), (False, True), (False, False)]  # namespaces, Landlock
        if self.paths is None:
            ways.remove((False, True))
        for self.has_filter, (self.has_namespaces, self.has_landlock) in itertools.product(filters, ways):
            with tempfile.TemporaryDirectory(prefix="rlplug-") as self.bait:
                os.chmod(self.bait, 0o777)
                with open(os.path.join(self.bait, "secret"), "w"):
                    os.chmod(self.bait + "/secret", 0o644)
                reply = self.run(None)
                can_write = os.path.exists(os.path.join(self.bait, "written"))
            if "failure" not in reply:
                self.walls = {*json.loads(reply["text"]), *(() if can_write else ("writes",))}
                is_isolated = self.has_filter and "trainer" in self.walls
                hides_files = is_isolated and {"files", "writes"} <= self.walls
                return {
                    "text": self._describe_isolation(problem),
                    "is_isolated": is_isolated,
                    "hides_files": hides_files,
                }
            problem = problem or reply["failure"]
        return reply

    def _describe_isolation(self, problem: str) -> str:
        found = [f"calls run as user {self.user}, which owns nothing else"] if self.user is not None else []
        if self.has_namespaces:
            found.append("they see no process of others and have a /dev/shm of their own")
        if "files" in self.walls:
            found.append("they read Python's files alone")
        if "writes" in self.walls:
            found.append("they can write nowhere else" if self.has_namespaces else "they can write nowhere")
        lacks = [] if self.has_filter else ["a filter of system calls, which this machine lacks"]
        if "trainer" not in self.walls:
            lacks.append(
                f"isolation: a call runs as the trainer's user, and can signal and read the trainer ({problem}). Allow "
                "user namespaces, or run as root"
            )
        elif not self.has_namespaces:
            lacks.append(f"namespaces ({problem})")
        if self.paths is not None and "files" not in self.walls:
            lacks.append("a wall before the files of this user, which a call can read")
        if self.settings["network"] or "network" not in self.walls:
            lacks.append("a limit of the network")
        return "; ".join([*found, *(f"without {each}" for each in lacks)])

    def run(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """Return the outcome of a call; without a request, return whether calls can run at all."""
        self._prepare(request)
        read_end, write_end = os.pipe()
        process = os.fork()
        if process == 0:
            self._be_the_call(request, write_end)
        os.close(write_end)
        try:
            line, is_late = self._wait(read_end, process)
        finally:
            status = self._end(process)
            os.close(read_end)
        return self._explain(line, is_late, status)

    def _prepare(self, request: dict[str, Any] | None) -> None:
        """Let a function with an attribute ``prepare`` load what its calls share, before they fork."""
        prepare = None if request is None else getattr(self.functions[request["function"]], "prepare", None)
        if request is not None and prepare is not None:
            with contextlib.suppress(Exception):  # the call itself then fails, and says why
                prepare(**request["arguments"])

    # ---- in the forked process --------------------------------------------------------------------------------------

    def _be_the_call(self, request: dict[str, Any] | None, write_end: int) -> NoReturn:
        try:
            os.close(self.replies)
            try:
                self._limit()
            except OSError as error:
                needs = "" if self.has_namespaces else f"; {ROOT_NEEDS}"
                answer = {"failure": f"calls cannot be limited ({describe(error)}){needs}"}
            else:
                answer = self._probe() if request is None else self._call(request)
            data = json.dumps(answer).encode() + b"\n"
            while data:
                data = data[os.write(write_end, data) :]
        finally:
            os._exit(1)

    def _limit(self) -> None:
        """Leave the session and the files of the worker, and set the isolation and limits of a call.

        With namespaces, the call is a child of this process, which ends as the child does.
        """
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        with open("/proc/self/statm") as file:
            own_bytes = int(file.read().split()[0]) * resource.getpagesize()
        num_others = self._num_other_tasks()
        limits.limit(resource.RLIMIT_CORE, 0)
        if self.has_namespaces:
            limits.end_with_parent()
            isolation.enter_namespaces(is_root=self.user is not None)
            if child := os.fork():
                isolation.end_like(child)
            options = isolation.shared_memory_options(self.settings["memory_mib"])
            if self.paths is None:
                isolation.mount_own_view(options)
            else:
                files.enter_own_root(self.paths, options)
        limits.limit(resource.RLIMIT_AS, own_bytes + self.settings["memory_mib"] * 2**20)
        limits.limit(resource.RLIMIT_CPU, math.ceil(self.settings["time_s"]) + 1)
        limits.limit(resource.RLIMIT_FSIZE, FILE_LIMIT_BYTES)
        limits.limit(resource.RLIMIT_NOFILE, MOST_FILES)
        limits.limit(resource.RLIMIT_NPROC, num_others + self.settings["max_processes"])
        has_own_root = self.has_namespaces and self.paths is not None
        if self.user is not None:
            limits.become(self.user, may_read=not has_own_root)
        elif self.has_namespaces and not limits.set_capabilities(0):
            raise PermissionError("the rights in the user namespace could not be dropped")
        limits.keep_rights()
        limits.end_with_parent()
        if self.has_landlock and self.paths is not None:
            files.refuse_other_files(self.paths)
        if self.has_filter:
            isolation.filter_system_calls(self.settings["network"], owners=not self.has_landlock)

    def _num_other_tasks(self) -> int:
        """Return how many threads the kernel counts as the call's user before the call starts any."""
        if self.user is not None:
            return 0
        if self.has_namespaces and limits.counts_by_namespace():
            return 1  # the process that waits for the call
        return limits.num_tasks_of(os.getuid()) - (not self.has_namespaces)

    def _probe(self) -> dict[str, Any]:
        """Return which walls stand, as JSON, or a failure if Python or the functions' files are behind one."""
        for file in (os.__file__, *(function.__code__.co_filename for function in self.functions.values())):
            try:
                os.close(os.open(file, os.O_RDONLY))  # os.access would not count capabilities
            except PermissionError:
                return {"failure": f"the user of calls, {os.getuid()}, may not read {file}; {ROOT_NEEDS}"}
            except FileNotFoundError:  # code that was not loaded from a file
                continue
        return {"text": json.dumps(files.try_walls(self.trainer, self.bait))}

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        random.seed(request["seed"])  # otherwise each fork would draw the same numbers
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(random.getrandbits(32))
        try:
            value = self.functions[request["function"]](**request["arguments"])
            return {"text": self._cut(as_text(value))}
        except MemoryError:
            return {"error": f"used more than {self.settings['memory_mib']} MiB of memory"}
        except BaseException as error:  # noqa: BLE001 - SystemExit too
            return {"error": self._cut(describe(error))}

    def _cut(self, text: str) -> str:
        more = len(text) - self.settings["output_chars"]
        return text if more <= 0 else f"{text[:-more]}\n[cut: {more} more characters]"

    # ---- beside the forked process ----------------------------------------------------------------------------------

    def _wait(self, read_end: int, process: int) -> tuple[bytes | None, bool]:
        """Return the answer, if there is one, and whether time ran out; all processes together may fill the memory."""
        deadline = time.monotonic() + self.settings["time_s"]
        own_bytes, most_bytes = limits.private_bytes(os.getpid()), TOTAL * self.settings["memory_mib"] * 2**20
        largest = 12 * self.settings["output_chars"] + 1000  # JSON writes a rare character in twelve bytes
        poller = select.poll()
        poller.register(read_end, select.POLLIN)
        poller.register(0, 0)  # reports only the end of the input
        data, look_at = b"", time.monotonic() + POLL_S
        while not data.endswith(b"\n"):
            now = time.monotonic()
            left = deadline - now
            if left <= 0:
                return None, True
            if now >= look_at:
                look_at = now + POLL_S
                if limits.bytes_below(own_bytes) > most_bytes:
                    return FULL, False
            has_ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            ready = [file for file, _ in poller.poll(0 if has_ended else min(left, POLL_S) * 1000)]
            if 0 in ready or os.getppid() != self.trainer:
                sys.exit(0)
            if read_end in ready:
                part = os.read(read_end, 65536)
                data += part
                if not part or len(data) > largest:
                    return None, False
            elif has_ended:
                return None, False
        return data, False

    def _end(self, process: int) -> int:
        """Kill the remaining processes of a call, and return the exit status of its first process."""
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        deadline = time.monotonic() + END_S
        while True:
            try:
                # no children means no descendants: each process of a call is a child here or has an ancestor that is
                ended, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self.user is not None and not self.has_namespaces:
                    limits.remove_files(self.user, isolation.SHARED_MEMORY)
                return status
            if ended == 0:
                if time.monotonic() > deadline:
                    sys.exit(f"Processes of a tool would not end: {limits.descendants()}.")
                self._kill_others()

    def _kill_others(self) -> None:
        if self.user is None:
            for pid in limits.descendants():
                limits.kill(pid)
        elif (killer := os.fork()) == 0:
            try:
                limits.end_user(self.user)
            finally:
                os._exit(0)
        else:
            os.waitpid(killer, 0)
        time.sleep(0.001)

    def _explain(self, line: bytes | None, is_late: bool, status: int) -> dict[str, Any]:
        full = {"error": f"used more than {TOTAL * self.settings['memory_mib']} MiB of memory in all its processes"}
        late = {"error": f"took longer than {self.settings['time_s']:g} s"}
        if is_late:
            return late
        if line is FULL:
            return full
        if line is not None:
            try:
                answer = json.loads(line)
            except ValueError:
                answer = None
            is_answer = isinstance(answer, dict) and [type(value) for value in answer.values()] == [str]
            return answer if is_answer else {"error": "wrote over its own result"}
        if not os.WIFSIGNALED(status):
            return {"error": f"ended its process with code {os.waitstatus_to_exitcode(status)}"}
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return late
        if number == signal.SIGKILL:
            return {"error": "was killed, most often for using too much memory"}
        return {"error": f"crashed ({signal.Signals(number).name})"}


# ---- text -----------------------------------------------------------------------------------------------------------


def as_text(value: Any) -> str:
    """Return a string as it is, and other values as JSON, or as ``str`` if JSON cannot represent them."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def describe(error: BaseException) -> str:
    """Return an exception's type and message."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own __str__ failed
        return type(error).__name__


if __name__ == "__main__":
    main()
