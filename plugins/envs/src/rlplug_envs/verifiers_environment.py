"""Environment that runs environments of the package verifiers, turn by turn."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from rlplug_sandbox.tool_calls import CallFormat, ToolCall, count_unread, find_calls, text_before_calls

from rlplug.errors import ConfigError
from rlplug.interfaces import Environment, StepResult
from rlplug.types import Prompt
from rlplug_envs.processes import EnvironmentHost, host_settings, shared_pool

_TRAJECTORIES: Final = itertools.count()


class VerifiersEnvironment(Environment):
    """Environment that runs one of the package verifiers unchanged: its turns, its tools and its rubric.

    Prompts come from ``VerifiersSource`` with the same ``environment`` and ``arguments``. The environment runs in
    processes of its own, which the trajectories of a rank share. Reward and metrics are those of its rubric, given with
    the last turn. A trajectory that rlplug's limits end before the environment does is not scored, so the environment's
    own ``max_turns`` should be the smaller one. Random numbers of the environment are not seeded.

    Tool calls in a turn reach the environment as ``tool_calls``, and the text in front of them as ``content``. A call
    that cannot be parsed reaches it with arguments that are not JSON, which it answers in its own way.

    Args:
        environment: Name for ``verifiers.load_environment``.
        arguments: Arguments of the environment's ``load_environment``.
        call_format: Format in which the policy writes tool calls, as in ``ToolEnvironment``.
        failed_rewards: Result of a trajectory in which a reward function of the rubric raises. With ``refuse`` it has
            no reward and does not train; with ``zero`` the function counts as 0, as in verifiers.
        num_processes: Processes per rank; each loads the environment.
        start_timeout_s: Longest time for loading the environment, in seconds.
        stall_timeout_s: Longest time in seconds for which the environment may block its process; then the process is
            ended and replaced, and its trajectories have no reward. Time in which it awaits something does not count.
    """

    def __init__(
        self,
        environment: str,
        arguments: dict[str, Any] | None = None,
        call_format: CallFormat = "auto",
        failed_rewards: Literal["refuse", "zero"] = "refuse",
        num_processes: int = 2,
        start_timeout_s: float = 600.0,
        stall_timeout_s: float = 60.0,
    ) -> None:
        if num_processes < 1:
            raise ConfigError(f"VerifiersEnvironment.num_processes is {num_processes}: give at least 1.")
        self.environment = environment
        self.call_format = call_format
        settings = host_settings(
            "VerifiersEnvironment",
            environment,
            arguments,
            failed_rewards == "refuse",
            start_timeout_s,
            stall_timeout_s,
        )
        self._pool = shared_pool(settings, num_processes)
        self._trajectory = next(_TRAJECTORIES)
        self._lock = threading.Lock()
        self._host: EnvironmentHost | None = None
        self._is_closed = False
        self._num_calls = 0
        self._name_of_call: dict[str, str] = {}
        self._prefix = ""

    def tools(self) -> Sequence[Mapping[str, Any]]:
        host = self._pool.acquire()
        self._pool.release(host)
        return host.tools

    async def reset(self, prompt: Prompt, seed: int) -> None:
        if prompt.metadata.get("environment") != self.environment:
            raise ConfigError(
                f"The prompt {prompt.uid!r} is not from the environment {self.environment!r}: set data.train and "
                f"data.val to VerifiersSource with environment {self.environment}."
            )
        self._prefix = prompt.text
        await asyncio.to_thread(self._acquire)
        await self._ask({"do": "begin", "example": prompt.metadata["example"]})

    async def step(self, completion: str) -> StepResult:
        answer = await self._ask({"do": "step", "completion": self._completion(completion)})
        if answer["done"]:
            return StepResult(reward=answer["reward"], done=True, metrics=answer["metrics"])
        return StepResult(observation=[self._observation(message) for message in answer["observation"]])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            host, self._host = self._host, None
        if host is not None:
            host.send({"do": "close", "trajectory": self._trajectory})
            self._pool.release(host)

    def _acquire(self) -> None:
        """Take a process for this trajectory, unless the trajectory was closed while the process started."""
        host = self._pool.acquire()
        with self._lock:
            if not self._is_closed:
                self._host = host
                return
        self._pool.release(host)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        host = self._host
        assert host is not None, "a trajectory is reset before it steps, and not used after close"
        answer: dict[str, Any] = await asyncio.wrap_future(host.request({"trajectory": self._trajectory, **request}))
        return answer

    def _completion(self, text: str) -> dict[str, Any]:
        """Return a turn as an API would: its text as ``content``, and its tool calls, if there are any."""
        host = self._host
        if host is None or not host.tools:
            return {"content": text}
        calls = find_calls(text, self.call_format, host.tools, self.response_template, self._prefix)
        if not calls:
            count_unread(text, self.call_format, host.tools, "VerifiersEnvironment.call_format")
            return {"content": text}
        tool_calls = []
        for call in calls:
            # nine letters and digits, as Mistral's chat templates demand
            call_id = call.call_id or f"call{self._num_calls:05d}"
            self._num_calls += 1
            self._name_of_call[call_id] = call.name
            arguments = json.dumps(call.arguments) if isinstance(call, ToolCall) else call.message
            tool_calls.append({"id": call_id, "name": call.name, "arguments": arguments})
        return {"content": text_before_calls(text, self.call_format), "tool_calls": tool_calls}

    def _observation(self, message: dict[str, str]) -> dict[str, str]:
        name = self._name_of_call.get(message.get("tool_call_id", ""))
        return message | {"name": name} if name else message
