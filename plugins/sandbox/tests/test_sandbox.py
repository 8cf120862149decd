"""Calls in real processes: what their limits stop, and that nothing of them is left."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sample_tools
from rlplug_sandbox import ToolEnvironment, sandbox_limits
from rlplug_sandbox.sandbox import Limits, SandboxError, ToolPool, ToolResult

from rlplug.errors import ConfigError
from rlplug.timeouts import TimeoutExecutor

pytestmark = pytest.mark.kit

SAMPLE = "sample_tools"
TESTS = Path(__file__).parent
NAMES = [name for name, value in vars(sample_tools).items() if inspect.isfunction(value)]
LIMITS = Limits(time_s=6.0, memory_mib=256, output_chars=1000, max_processes=8)
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def pool():
    return ToolPool([f"{SAMPLE}.{name}" for name in NAMES], LIMITS, num_workers=2)


@pytest.fixture
def call(pool):
    def run(name: str, seed: str = "0", **arguments: object) -> ToolResult:
        result = pool.call(f"{SAMPLE}.{name}", arguments, seed)
        assert not calls_of(os.getpid())
        return result

    return run


def processes_of(trainer: int) -> dict[int, int]:
    """Return the workers of a process, and whatever was forked from them, with their parents."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            state, parent, *_ = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        is_worker = len(words) > 2 and words[1].endswith(b"sandbox_process.py") and words[2] == str(trainer).encode()
        if is_worker and state != "Z":
            found[int(path.name)] = int(parent)
    return found


def calls_of(trainer: int) -> list[int]:
    """Return the processes that workers of a process forked."""
    return [pid for pid, parent in processes_of(trainer).items() if parent != trainer]


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1, "é"], '[1, "é"]'),
        ({"a": [None]}, '{"a": [null]}'),
    ],
)
def test_a_result_is_text_or_json(call, value, text):
    assert call("echo", value=value) == ToolResult(text)


def test_a_result_that_is_no_valid_text_becomes_one(call):
    assert call("half_a_letter") == ToolResult("a?b")


@pytest.mark.parametrize(("length", "more"), [(1000, 0), (1001, 1), (50_000_000, 49_999_000)])
@pytest.mark.parametrize("letter", ["x", "\U0001f600"])
def test_a_long_result_is_cut_and_says_how_much(call, length, more, letter):
    if letter != "x":
        length, more = min(length, 5000), min(more, 4000)
    note = f"\n[cut: {more} more characters]" if more else ""
    assert call("shout", length=length, letter=letter) == ToolResult(letter * 1000 + note)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fail", {"message": "no such key"}, "LookupError: no such key"),
        ("fail", {"message": "x" * 2000}, "LookupError: " + "x" * 987 + "\n[cut: 1013 more characters]"),
        ("leave", {"code": 3}, "ended its process with code 3"),
        ("leave", {"code": 0}, "ended its process with code 0"),
        ("politely_leave", {}, "SystemExit: 3"),
        ("crash", {}, "crashed (SIGSEGV)"),
        ("hoard", {"mib": 512}, "used more than 256 MiB of memory"),
        ("shout", {"length": 10**9}, "used more than 256 MiB of memory"),
        pytest.param("sleep", {"seconds": 60.0}, "took longer than 6 s", marks=pytest.mark.nightly),
        pytest.param("spin", {}, "took longer than 6 s", marks=pytest.mark.nightly),
        ("bomb", {}, "took longer than 6 s"),
    ],
)
def test_what_goes_wrong_in_a_call_is_its_result(call, name, arguments, message):
    assert call(name, **arguments) == ToolResult(message, is_error=True)
    assert call("add", a=1, b=2) == ToolResult("3")


def test_memory_below_the_limit_is_there(call):
    assert call("hoard", mib=200) == ToolResult(str(200 * 2**20))


def test_processes_that_replace_each_other_are_ended(call):
    assert call("comet") == ToolResult("ended its process with code 0", is_error=True)


def test_children_are_limited_in_number(call):
    count = int(call("fork_all").text)
    if os.geteuid() == 0:
        assert count == LIMITS.max_processes - 1  # the call itself is one
    else:
        assert count < LIMITS.max_processes + 50  # other processes of this user may have ended meanwhile


def test_a_daemon_ends_with_its_call(call):
    marker = f"98765.{os.getpid()}"
    assert call("start_daemon", seconds=marker) == ToolResult("started")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if marker.encode() in command]


@is_root
def test_root_gives_up_its_rights_for_a_call(call, pool, tmp_path):
    real, effective, saved, may_return = map(int, call("user").text.strip("[]").split(","))
    assert real == effective == saved >= sandbox_limits.FIRST_USER
    assert may_return == 0
    call("kill_parent")  # in namespaces of its own a call has none
    assert all(worker.poll() is None for worker in pool._workers)
    assert call("write", path=str(tmp_path / "file"), size=1).text.startswith("PermissionError")


def test_a_file_is_limited_in_size(call, tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    assert call("write", path=str(tmp_path / "small"), size=1000) == ToolResult("1000")
    assert "File too large" in call("write", path=str(tmp_path / "large"), size=20 * 2**20).text


def test_what_a_call_prints_or_writes_elsewhere_is_no_result(call, capfd):
    assert call("talk") == ToolResult("done")
    assert call("scribble").is_error
    assert call("add", a=1) == ToolResult("2")
    assert capfd.readouterr() == ("", "")


def test_a_call_leaves_no_trace_in_the_next(call):
    assert [call("count").text for _ in range(3)] == ["1"] * 3
    assert call("draw", seed="1") == call("draw", seed="1") != call("draw", seed="2")


def test_a_hundred_calls_at_once_each_get_their_own_result(pool):
    with ThreadPoolExecutor(100) as threads:
        results = list(threads.map(lambda a: pool.call(f"{SAMPLE}.add", {"a": a, "b": 1000}, "0"), range(100)))
    assert [result.text for result in results] == [str(a + 1000) for a in range(100)]
    assert len(pool._workers) <= 2


@pytest.mark.parametrize("how", ["late", "cancelled"])
def test_a_call_that_nobody_waits_for_frees_its_worker_at_once(how):
    """Alone catches a call that keeps its place until its own limit, so that the next step waits for it."""
    alone = ToolPool([f"{SAMPLE}.sleep"], dataclasses.replace(LIMITS, time_s=600.0), num_workers=1)
    alone.check()
    is_cancelled = threading.Event()
    call = functools.partial(alone.call, f"{SAMPLE}.sleep", {"seconds": 500.0}, "0", is_cancelled.is_set)
    if how == "late":
        (first,) = TimeoutExecutor(1.0, 1).run([call], [str])
        assert first.error == "took longer than 1 s"
    else:
        threading.Timer(1.0, is_cancelled.set).start()
        with pytest.raises(SandboxError, match="nobody waits for it"):
            call()
    began = time.monotonic()
    assert not alone.call(f"{SAMPLE}.sleep", {"seconds": 0.0}, "0").is_error
    assert time.monotonic() - began < 120


def test_a_worker_that_is_killed_costs_its_call_and_is_replaced(pool):
    pool.check()
    threads = [threading.Thread(target=os.kill, args=(worker.pid, signal.SIGKILL)) for worker in pool._workers]
    for thread in threads:
        thread.start()
        thread.join()
    with pytest.raises(SandboxError, match="ended with code -9"):
        pool.call(f"{SAMPLE}.add", {"a": 1}, "0")
    for _ in range(2):
        try:
            pool.call(f"{SAMPLE}.add", {"a": 1}, "0")
        except SandboxError:  # the other one
            continue
    assert pool.call(f"{SAMPLE}.add", {"a": 1}, "0") == ToolResult("2")


def test_a_worker_that_is_asked_to_end_takes_its_call_along(pool):
    errors = []

    def run():
        try:
            pool.call(f"{SAMPLE}.bomb", {}, "0")
        except SandboxError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(lambda: len(calls_of(os.getpid())) > 3, 2.5)
    for worker in list(pool._workers):
        worker.terminate()
    thread.join()
    assert "ended with code 0" in errors[0]
    assert wait_until(lambda: not calls_of(os.getpid()))


@is_root
def test_a_call_whose_worker_is_killed_is_ended_by_the_trainer(pool):
    thread = threading.Thread(target=pytest.raises, args=(SandboxError, pool.call, f"{SAMPLE}.bomb", {}, "0"))
    thread.start()
    assert wait_until(lambda: len(calls_of(os.getpid())) > 3, 2.5)
    for worker in list(pool._workers):
        worker.kill()
    thread.join()
    assert wait_until(lambda: not calls_of(os.getpid()), 5.0)


TRAINER = f"""
import os, sys, threading, time
from rlplug_sandbox.sandbox import Limits, ToolPool
pool = ToolPool(["{SAMPLE}.bomb", "{SAMPLE}.add"], Limits(600.0, 256, 1000, 8), 2)
pool.check()
threading.Thread(target=pool.call, args=("{SAMPLE}.bomb", {{}}, "0"), daemon=True).start()
assert pool.call("{SAMPLE}.add", {{"a": 1}}, "0").text == "2"
time.sleep(0.5)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_workers_and_their_calls_end_with_the_trainer(is_killed):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    assert trainer.stdout.readline() == b"ready\n"
    assert len(processes_of(trainer.pid)) > 4
    if is_killed:
        trainer.kill()
    trainer.communicate()
    assert wait_until(lambda: not processes_of(trainer.pid))


OTHER_USER = f"""
import os
from rlplug_sandbox.sandbox import Limits, ToolPool
names = ["add", "bomb", "comet", "fork_all", "start_daemon", "user"]
pool = ToolPool(["{SAMPLE}." + name for name in names], Limits(2.0, 256, 1000, 8), 1)
def call(name, **arguments):
    return pool.call("{SAMPLE}." + name, arguments, "0").text
print(os.getuid(), call("user"), call("fork_all"), call("bomb"), call("start_daemon", seconds="98764.5"))
print(call("comet"), call("add", a=1))
from test_sandbox import calls_of
print(calls_of(os.getpid()))
"""


@pytest.mark.nightly
@is_root
def test_another_user_than_root_has_the_same_limits():
    user = sandbox_limits.FIRST_USER - 1
    result = subprocess.run(
        [sys.executable, "-c", OTHER_USER],
        env=os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: sandbox_limits.become(user),  # who may still read Python's own files
        capture_output=True,
        text=True,
        check=True,
    )
    calls, last, left = result.stdout.splitlines()
    assert calls == f"{user} [{user}, {user}, {user}, 0] 7 took longer than 2 s started"
    assert (last, left) == ("ended its process with code 0 2", "[]")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if b"98764.5" in command]


def test_a_function_that_only_workers_cannot_import_stops_the_run(tmp_path, monkeypatch):
    (tmp_path / "fickle.py").write_text(
        "import os, sys\n"
        "if sys.argv[0].endswith('sandbox_process.py'):\n"
        "    raise OSError('not here')\n"
        "def f(x: int) -> int:\n"
        "    '''Return x.\n\n    Args:\n        x: A number.\n    '''\n"
        "    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"fickle.f cannot be called: OSError: not here"):
        ToolEnvironment(["fickle.f"]).tools()


@is_root
def test_files_that_calls_may_not_read_stop_the_run(tmp_path):
    # without the right of root to read, Python below /root would be out of reach
    code = (
        "from rlplug_sandbox.sandbox import Limits, ToolPool\n"
        "ToolPool(['fickle.f'], Limits(2.0, 256, 1000, 8), 1).check()\n"
    )
    (tmp_path / "fickle.py").write_text("def f(x):\n    return x\n")
    tmp_path.chmod(0o700)
    dropped = ["setpriv", "--bounding-set=-dac_read_search", "--inh-caps=-dac_read_search"]
    result = subprocess.run(
        [*dropped, sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "may not read" in result.stderr
    assert "CAP_DAC_READ_SEARCH" in result.stderr
