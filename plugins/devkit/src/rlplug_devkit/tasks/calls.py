"""What the kits of tasks share: calls as a run makes them, what those leave behind, hostile texts."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import queue
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Final, NoReturn

import numpy
import psutil
import pytest
import torch

from rlplug.timeouts import Call, TimeoutExecutor
from rlplug_devkit import claims
from rlplug_devkit.claims import ConformanceReport
from rlplug_devkit.kit import Kit
from rlplug_devkit.process_guard import ProcessGuard
from rlplug_devkit.process_state import children, generator_states, moved, thread_state
from rlplug_devkit.tasks.elsewhere import ask_elsewhere
from rlplug_devkit.tasks.task_guard import TaskGuard, replacements
from rlplug_devkit.written_files import WrittenFiles

NUM_THREADS: Final = 8
NUM_REPEATED: Final = 5
"""Calls of which each may leave something."""
PAUSE_S: Final = 1e-4
"""What other threads get behind each operation of one in :func:`slow_motion`, in seconds."""
MOST_KEPT: Final = 64
"""Objects that a plugin may keep of earlier calls, as the last ones."""
RELEASE_S: Final = 3.0
"""Longest time for what a call has closed to end, in seconds."""
MOST_WAITS: Final = 3
"""Times that a class's checks wait for late calls."""
ELSEWHERE_S: Final = 600.0
"""Longest time for another process to start, import and answer, in seconds."""
KEPT: Final = "an object that it was given or made"
OWN_THREADS: Final = "rlplug-"
"""How the names of the threads begin that make the calls."""
UNUSUAL_SEED: Final = 918_273_645
NOT_COMPARED: Final = f"{claims.NOT_COMPARED}an earlier check says what is wrong with the calls"
HOSTILE: Final = {
    "nothing": "",
    "white space": " \n\t\r\n",
    "long": "1 + (" * 20_000,
    "ten thousand words": "the answer is 4, " * 2_500,
    "long white space": " " * 20_000 + "x",
    "control characters": "\x00\x1b[2J\x07\x7f",
    "end tokens": "<|im_end|><|endoftext|></s><think></tool_call>",
    "numbers": "1e400 -0 NaN 9" + "9" * 500 + " 1_000 ١٢٣",
    "brackets": "{" * 2000 + "[" * 2000,
    "lists in lists": "[" * 100_000,
    "more digits than an integer may have": "7" * 5_000,
    "letters of two bytes": "é" * 2_000,
    "letters of two bytes behind one": "x" + "é" * 2_000,
    "other scripts": "日本語 עברית \u202eabc e\u0301 \U0001f469\u200d\U0001f680",
    "code": "__import__('os')._exit(3)",
    "markup": "[bold]</pre><script>alert(1)</script>%s{0}${x}",
    "a digit that is no number": "\xb2",
    "a number below all": "-1",
    "a number above all": "99999999",
    "zero": "0",
    "infinity": "inf",
    "no number": "nan",
    "a division by zero": "1/0",
    "JSON without what is needed": '{"name": null, "arguments": [1]}',
    "an empty list": "[]",
    "a tag that is never closed": "</answer><answer>",
}
"""Texts that a policy may write, by what they are."""


def as_list(returned: Any) -> Any:
    """Return what a call returned, as a list where it yields values: a run reads them in the call's thread too."""
    is_iterable = hasattr(type(returned), "__iter__") and not isinstance(returned, str | bytes | dict)
    return list(returned) if is_iterable else returned


@contextmanager
def same_random_generators(subject: str) -> Iterator[None]:
    """Fail when the body draws from a random generator of the process, or seeds it."""
    kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(UNUSUAL_SEED)  # a body that seeds them alike each time has done so before
    numpy.random.seed(UNUSUAL_SEED)
    torch.manual_seed(UNUSUAL_SEED)
    before = generator_states()
    try:
        yield
    finally:
        names = moved(before)
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
    assert not names, (
        f"{subject} moves the global generators {sorted(names)}, from which the rest of the run draws: a resumed run "
        "would differ. Draw from a generator of your own, such as random.Random(seed)."
    )


@contextmanager
def eager_threads() -> Iterator[None]:
    """Let threads take turns as often as Python can, so that they meet in the middle of each other's calls."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def slow_motion() -> Iterator[None]:
    """Let other threads run behind each operation of the functions that this thread calls meanwhile."""

    def traced(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            time.sleep(PAUSE_S)
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        yield
    finally:
        sys.settrace(before)


def is_same(first: Any, second: Any) -> bool:
    """Return whether two values are equal, also where they hold arrays, whose ``==`` is no truth value, or NaNs."""
    try:
        if first == second:
            return True
    except ValueError:
        return repr(first) == repr(second)
    return "nan" in (text := repr(first)) and text == repr(second)


class OneThread:
    """A thread that runs functions one after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"{OWN_THREADS}source", daemon=True).start()

    def run(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, or raise what it raises."""
        future: Future[Any] = Future()
        self._jobs.put((future, function))
        return future.result()

    def _work(self) -> None:
        while True:
            self._run(*self._jobs.get())

    @staticmethod
    def _run(future: Future[Any], function: Callable[[], Any]) -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - that of pytest.fail is no Exception
            future.set_exception(error)


class TaskChecks(Kit):
    """Base class of the checks: their report, calls as a run makes them, and settings that all have."""

    deadline_s = 30.0
    """Longest time for one call in seconds."""
    guard: ProcessGuard
    """What the checks of the class have changed of the process until now."""
    writes_into: ClassVar[Sequence[Path | str]] = ()
    """Files and folders that options of the plugin name for it to write; temporary files and caches are free."""
    pytestmark = pytest.mark.timeout(600)  # of pytest-timeout: a call may hold the interpreter's lock
    _reports: ConformanceReport | None = None
    _tests = ""
    _objects: ClassVar[list[weakref.ref[Any]]] = []
    _borrowed: set[str] | None = None
    """What calls replace of the process while they run; ``None`` where nobody looks."""
    _is_late: ClassVar[bool] = False
    """Whether ordinary calls miss their deadline, or never end: no later check waits for more of them."""
    _num_waits: ClassVar[int] = 0

    def _subject(self) -> str:
        """Return the name of what is tested."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _report(self, request: pytest.FixtureRequest) -> None:
        if "guard" not in type(self).__dict__:
            type(self).guard = ProcessGuard()
        claim = "every check"
        self._reports, self._tests = ConformanceReport.of(request.config), request.node.nodeid.rpartition("::")[0]
        self._reports.include(self._tests, self._subject(), {claim: None})
        request.node.user_properties.append(("rlplug_claim", claim))
        if self._is_late:
            pytest.skip(NOT_COMPARED)

    def _not_compared(self, problem: str) -> NoReturn:
        """End a check whose calls failed: skip it where another has failed before, and fail it otherwise."""
        self._skip_after_failure()
        pytest.fail(f"only in this check, {problem}", pytrace=False)

    def _skip_after_failure(self) -> None:
        """Skip a check that repeats others for a more special case, where one has failed before."""
        if self._reports is not None and self._reports.has_failure(self._tests):
            pytest.skip(NOT_COMPARED)

    # ---- calls ----------------------------------------------------------------------------------------------------

    @classmethod
    def _guard(cls) -> TaskGuard:
        """Return the guard of all calls of this class: what one changes once is there in all later ones."""
        if "_own_guard" not in vars(cls):
            cls._own_guard = TaskGuard(WrittenFiles(cls.writes_into))  # type: ignore[attr-defined]
        guard: TaskGuard = cls._own_guard  # type: ignore[attr-defined]
        return guard

    @classmethod
    def _executor(cls) -> TimeoutExecutor:
        """Return the executor of all calls of this class: those on its event loop share the loop, as in a run."""
        if "_own_executor" not in vars(cls):
            cls._own_executor = TimeoutExecutor(cls.deadline_s, NUM_THREADS)  # type: ignore[attr-defined]
        executor: TimeoutExecutor = cls._own_executor  # type: ignore[attr-defined]
        return executor

    def _calls(self, functions: Sequence[Callable[[], Any]], read: Callable[[Any], Any] = as_list) -> list[Call]:
        """Call functions as a run does: at once, in threads or on an event loop, each with a deadline.

        The check fails where calls were late too often: the next ones would be, each after its whole deadline.

        Returns:
            Their calls, of which each has a ``value``, as ``read`` makes it of what was returned, or an ``error``.
        """
        watched = [self._watched(function) for function in functions]
        calls = self._executor().run(watched, [self._watched(read)] * len(functions))
        if late := [call.error for call in calls if call.error and call.kind == "late"]:
            type(self)._num_waits += 1
            if self._reports is not None:
                self._reports.has_late = True
            if self._num_waits >= MOST_WAITS:
                type(self)._is_late = True
                pytest.fail(
                    f"a call {late[0]}, as others did before: they wait for what another holds, such as a lock, or for "
                    "jobs of their own behind themselves in one pool. Hold things for a moment, and in one order.",
                    pytrace=False,
                )
        return calls

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also notes what it changes of its thread, on which later calls run."""

        def call(*arguments: Any) -> Any:
            before = thread_state()
            try:
                with replacements(self._borrowed):
                    return function(*arguments)
            finally:
                for name, present in thread_state().items():
                    if present != before[name]:
                        text = f"a call changed {name} in its thread: {before[name]} became {present}"
                        self._guard().changes.setdefault(f"{name} of a thread", text)

        return call

    # ---- checks that all kinds have -------------------------------------------------------------------------------

    def _require_unchanged_process(self, subject: str) -> None:
        changes = self._guard().changes
        assert not changes, (
            f"{subject}: {'; '.join(changes.values())}. The trainer and all other plugins share that: pass options to "
            "the calls that need them, restore in finally, and write into temporary files, or what writes_into names."
        )

    def _require_nothing_borrowed(self, subject: str, once: Callable[[], Any]) -> None:
        """Fail where a call replaces what the process has once, even if it puts it back: others run meanwhile."""
        self._borrowed = set()
        once()
        borrowed, self._borrowed = self._borrowed, None
        assert not borrowed, (
            f"{subject} replaces {' and '.join(sorted(borrowed))} while a call runs, and other threads share that. "
            "Give what prints a stream of its own, name files by their whole path, or use another process."
        )

    def _require_nothing_left(self, subject: str, once: Callable[[], Any]) -> None:
        """Fail when each call of ``once`` leaves a thread, a process, an open file or a temporary file."""
        once()
        before = self._held()
        for _ in range(NUM_REPEATED):
            once()
        if self._num_kept() - before[KEPT] > NUM_REPEATED // 2:
            for _ in range(MOST_KEPT):
                once()
        least = dict.fromkeys(before, NUM_REPEATED) | {KEPT: MOST_KEPT}
        ends_at = time.monotonic() + RELEASE_S
        while grown := [name for name, n in self._held().items() if n - before[name] >= least[name]]:
            if time.monotonic() > ends_at:
                pytest.fail(
                    f"{subject} leaves {', '.join(grown)} behind each time: a run calls it a hundred thousand times. "
                    "Close and join what a call has opened.",
                    pytrace=False,
                )
            time.sleep(0.1)
            gc.collect()

    def _held(self) -> dict[str, int]:
        return {
            "a thread": sum(not thread.name.startswith(OWN_THREADS) for thread in threading.enumerate()),
            "a process": len(children()),
            "an open file": psutil.Process().num_fds(),
            "a temporary file": len(self._guard().files.left()),
            "a task of the event loop": self._num_tasks(),
            "a function to call at the exit": atexit._ncallbacks(),
            KEPT: self._num_kept(),
        }

    @classmethod
    def _watch(cls, given: Any) -> None:
        """Note an object that nothing should keep after the calls that it belongs to."""
        with contextlib.suppress(TypeError):  # of __slots__ without __weakref__
            cls._objects.append(weakref.ref(given))

    @classmethod
    def _num_kept(cls) -> int:
        """Return how many of those objects are alive."""
        cls._objects[:] = [reference for reference in cls._objects if reference() is not None]
        if len(cls._objects) >= NUM_REPEATED:
            gc.collect()
            cls._objects[:] = [reference for reference in cls._objects if reference() is not None]
        return len(cls._objects)

    @classmethod
    def _num_tasks(cls) -> int:
        """Return the number of tasks on the event loop of the calls."""
        loop = cls._executor()._loop
        return 0 if loop is None else len(asyncio.all_tasks(loop._loop))

    def _of_another_process(self, method: str) -> Any:
        """Return what a method has returned in another process, which is asked once for all checks of the class."""
        if "_returned" not in vars(type(self)):
            type(self)._returned = self._elsewhere(method)  # type: ignore[attr-defined]
        return type(self)._returned  # type: ignore[attr-defined]

    def _elsewhere(self, method: str, is_fresh: bool = False) -> Any:
        """Return what a method of the test class returns in another process, with other hashes of texts.

        Args:
            method: Its name.
            is_fresh: Ask a process in which no other check has asked anything.
        """
        try:
            return ask_elsewhere(self, method, ELSEWHERE_S, is_fresh)
        except LookupError as error:
            pytest.skip(f"does not apply: {error}")
        except RuntimeError as error:
            return self._not_compared(f"another process cannot make or ask it: {error}")
