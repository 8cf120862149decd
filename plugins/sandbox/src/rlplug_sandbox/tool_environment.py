"""Environment whose tools are plain Python functions."""

from __future__ import annotations

import os
import threading
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rlplug.errors import ConfigError, did_you_mean
from rlplug.interfaces.environment import Environment, Message, StepResult
from rlplug.types import Prompt
from rlplug_sandbox.sandbox import Limits, SandboxError, ToolPool, ToolResult
from rlplug_sandbox.tool_calls import AnyCall, CallFormat, MalformedCall, ToolCall, count_unread, find_calls
from rlplug_sandbox.tool_schema import ToolFunction, tool_functions

MAX_WORKERS: Final = 8
CALL_FORMATS: Final[tuple[str, ...]] = typing.get_args(CallFormat)


class ToolEnvironment(Environment):
    """Environment with functions as tools: a turn with calls gets their results, a turn without ends the trajectory.

    Each call runs in a process of its own, with the limits of :mod:`rlplug_sandbox.sandbox`, and sees modules as
    they were imported: state that a function stores is lost after its call. Calls of one turn run one after another.
    Any error of a call, from its JSON to its memory, reaches the policy as the call's result.

    The environment gives no reward of its own.

    Args:
        functions: Import paths of functions with type hints and a docstring, such as ``my_package.tools.search``; see
            :func:`rlplug_sandbox.tool_functions`.
        call_format: Format in which the policy writes calls, one of :mod:`rlplug_sandbox.tool_calls`; ``auto`` takes
            the tokenizer's ``response_template``, and detects the format without one.
        time_limit_s: Longest time for a call, in seconds.
        memory_limit_mib: Memory limit of each process of a call, in MiB.
        output_limit_chars: Longest result in characters; a longer one is cut, and says by how much.
        max_processes: Largest number of processes and threads of a call.
        max_calls: Largest number of calls in a trajectory; a turn that would exceed it ends the trajectory, and its
            calls do not run. ``null`` for no limit.
        num_workers: Number of calls that run at once in this process of the trainer; the number of CPU cores by
            default, at most 8.

    Raises:
        ConfigError: A setting is out of range, or a function cannot be described to a policy.
    """

    def __init__(
        self,
        functions: Sequence[str],
        call_format: CallFormat = "auto",
        time_limit_s: float = 5.0,
        memory_limit_mib: int = 1024,
        output_limit_chars: int = 4096,
        max_processes: int = 16,
        max_calls: int | None = None,
        num_workers: int | None = None,
    ) -> None:
        if call_format not in CALL_FORMATS:
            raise ConfigError(
                f"ToolEnvironment.call_format is {call_format!r}: give one of {', '.join(CALL_FORMATS)}."
                f"{did_you_mean(call_format, CALL_FORMATS)}"
            )
        _check_positive("time_limit_s", time_limit_s, "number of seconds")
        _check_positive("memory_limit_mib", memory_limit_mib, "number of MiB")
        _check_positive("output_limit_chars", output_limit_chars, "number of characters")
        _check_positive("max_processes", max_processes, "count; a function that starts none needs 1")
        _check_positive("max_calls", max_calls, "count, or null for no limit")
        _check_positive("num_workers", num_workers, "count, or null for the number of CPU cores")
        self.call_format, self.max_calls = call_format, max_calls
        self._functions = {tool.name: tool for tool in tool_functions(tuple(functions))}
        limits = Limits(time_limit_s, memory_limit_mib, output_limit_chars, max_processes)
        num_cores = len(os.sched_getaffinity(0))
        self._pool = _shared_pool(tuple(functions), limits, num_workers or min(MAX_WORKERS, num_cores))
        self._is_closed = False
        self._seed = 0
        self._num_calls = 0
        self._prefix = ""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        try:
            self._pool.check()
        except SandboxError as error:
            raise ConfigError(f"ToolEnvironment cannot run its functions. {error}") from error
        return [tool.schema for tool in self._functions.values()]

    def notes(self) -> list[str]:
        return [f"tools: {self._pool.isolation}"]

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._seed, self._prefix = seed, prompt.text

    def step(self, completion: str) -> StepResult:
        """Run the calls of a turn, and return their results as tool messages.

        The metric ``tool_calls`` is the number of calls in the turn. A turn with calls also has the metrics
        ``malformed_calls``, the share of calls that cannot be parsed, name no function or have wrong arguments, and
        ``failed_calls``, the share that ended in an error or at a limit. One without has ``unread_calls``: 1 when it
        looks like a call in a format that is not read, which is warned of once, else 0.
        """
        schemas = [tool.schema for tool in self._functions.values()]
        calls = find_calls(completion, self.call_format, schemas, self.response_template, self._prefix)
        metrics = {"tool_calls": float(len(calls))}
        if not calls:
            metrics |= count_unread(completion, self.call_format, schemas, "ToolEnvironment.call_format")
            return StepResult(done=True, metrics=metrics)
        if self.max_calls is not None and self._num_calls + len(calls) > self.max_calls:
            refusal = ToolResult(f"no call ran: at most {self.max_calls} are allowed (max_calls)", is_error=True)
            return StepResult([_message(call, refusal) for call in calls], done=True, metrics=metrics)
        problems = [self._problem_with(call) for call in calls]
        results = [
            self._run(call, number) if problem is None else ToolResult(problem, is_error=True)
            for number, (call, problem) in enumerate(zip(calls, problems, strict=True), start=self._num_calls)
        ]
        self._num_calls += len(calls)
        num_malformed = sum(problem is not None for problem in problems)
        num_errors = sum(result.is_error for result in results)
        metrics["malformed_calls"] = num_malformed / len(calls)
        metrics["failed_calls"] = (num_errors - num_malformed) / len(calls)
        return StepResult([*map(_message, calls, results)], metrics=metrics)

    def close(self) -> None:
        self._is_closed = True
        self._pool.wake()

    def _problem_with(self, call: AnyCall) -> str | None:
        if isinstance(call, MalformedCall):
            return call.message
        function: ToolFunction | None = self._functions.get(call.name)
        if function is None:
            near = did_you_mean(call.name, self._functions)
            return f"there is no function {call.name!r}.{near} The functions are {', '.join(self._functions)}."
        return function.problem_with(call.arguments)

    def _run(self, call: AnyCall, number: int) -> ToolResult:
        assert isinstance(call, ToolCall)
        function, seed = self._functions[call.name].path, f"{self._seed}:{number}"
        return self._pool.call(function, call.arguments, seed, lambda: self._is_closed)


def _message(call: AnyCall, result: ToolResult) -> Message:
    content = f"Error: {result.text}" if result.is_error else result.text
    message = {"role": "tool", "name": call.name, "content": content}
    return message | ({"tool_call_id": call.call_id} if call.call_id else {})


def _check_positive(name: str, value: float | None, what: str) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"ToolEnvironment.{name} is {value}: give a positive {what}.")


_pools: dict[tuple[Any, ...], ToolPool] = {}
_pools_lock = threading.Lock()


def _shared_pool(functions: tuple[str, ...], limits: Limits, num_workers: int) -> ToolPool:
    """Return this process's pool with these settings, whose workers the environments of all trajectories share."""
    key = (os.getpid(), functions, limits, num_workers)  # a forked process must not use its parent's workers
    with _pools_lock:
        if key not in _pools:
            _pools[key] = ToolPool(functions, limits, num_workers)
        return _pools[key]
