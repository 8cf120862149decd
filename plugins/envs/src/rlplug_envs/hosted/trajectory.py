"""Rollout of a verifiers environment, driven turn by turn.

An environment runs as verifiers itself runs it, with ``Environment.run_rollout``. Only its client is ours, which waits
for the trainer's policy when the environment requests a completion.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
import math
import time
from typing import Any

from rlplug_envs.hosted.loading import Refusal, as_observation

TRAJECTORY: contextvars.ContextVar[Trajectory] = contextvars.ContextVar("trajectory")


class Trajectory:
    """Rollout of the environment, whose completions come from the trainer, turn by turn."""

    def __init__(self, environment: Any, example: dict[str, Any], refuse_failed_rewards: bool) -> None:
        self.environment = environment
        self.example = example
        self.refuse_failed_rewards = refuse_failed_rewards
        self.failed_rewards: list[str] = []
        self.problem = ""
        normalize = importlib.import_module("verifiers.utils.message_utils").normalize_messages
        self.conversation = [plain(message) for message in normalize(example["prompt"])]
        self.completions: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.answer: asyncio.Future[dict[str, Any]]
        self.task: asyncio.Task[None]

    async def begin(self) -> dict[str, Any]:
        """Run the environment until it requests the first completion."""
        self.answer = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run())
        answer = await self.answer
        if answer["done"]:
            raise Refusal("the environment ended before the policy's first turn")
        if answer["observation"]:
            raise Refusal("the environment adds to the prompt when it begins, and the policy has only seen the prompt")
        return {}

    async def step(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Give the environment a completion, and return its answer."""
        self.answer = asyncio.get_running_loop().create_future()
        self.completions.put_nowait(turn)
        return await self.answer

    def close(self) -> None:
        """End the rollout, with the environment's own clean-up."""
        self.task.cancel()
        self.answer.cancel()

    async def next_completion(self, prompt: list[Any]) -> dict[str, Any]:
        """Return the policy's completion of ``prompt``; the environment calls this through its client."""
        messages = [plain(message) for message in prompt]
        try:
            self.answer.set_result({"done": False, "observation": self._news(messages)})
        except Refusal as refusal:
            self.problem = str(refusal)
            raise
        completion = await self.completions.get()
        self.conversation = [*messages, {"role": "assistant", **completion}]
        return completion

    def _news(self, messages: list[dict[str, Any]]) -> list[dict[str, str]]:
        """Return those of ``messages`` that the policy has not seen."""
        if self.answer.done():
            raise Refusal("the environment asks the policy for several completions at once")
        known = len(self.conversation)
        if messages[:known] != self.conversation:
            raise Refusal("the environment rewrites the conversation, and the policy has seen it as it was")
        return [as_observation(message, "an observation") for message in messages[known:]]

    async def _run(self) -> None:
        TRAJECTORY.set(self)
        try:
            output = await self.environment.run_rollout(
                input=self.example, client=policy_class()(self), model="policy", sampling_args={}
            )
            metrics = {name: float(value) for name, value in (output.get("metrics") or {}).items()}
            self.answer.set_result({"done": True, "reward": self._reward(output), "metrics": metrics})
        except Exception as error:  # noqa: BLE001 - any error is an answer to the trainer's request
            self.answer.set_exception(error)

    def _reward(self, output: dict[str, Any]) -> float:
        if self.problem:
            raise Refusal(self.problem)
        if error := output.get("error"):
            raise RuntimeError(f"the environment failed: {error.get('error_chain_repr') or error}")
        if self.failed_rewards and self.refuse_failed_rewards:
            raise RuntimeError(
                f"{self.failed_rewards[0]}; set failed_rewards to zero to count that as 0, as verifiers does"
            )
        reward = float(output["reward"])
        if not math.isfinite(reward):
            raise RuntimeError(f"the environment's reward is {reward}")
        return reward


def plain(message: Any) -> dict[str, Any]:
    """Return a message of verifiers as a dictionary, without unset fields."""
    fields: dict[str, Any] = message.model_dump(exclude_none=True)
    return fields


def policy_class() -> Any:
    """Return the class of the client from which environments request completions."""
    types = importlib.import_module("verifiers.types")
    base = importlib.import_module("verifiers.clients").Client

    class Policy(base):  # type: ignore[misc, valid-type]
        """Client of verifiers that gets completions from a trajectory instead of an API."""

        def setup_client(self, config: Any) -> Any:
            raise AssertionError("made from a trajectory, never from a configuration")

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> dict[str, Any]:
            completion: dict[str, Any] = await self.client.next_completion(prompt)
            return completion

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: dict[str, Any]) -> Any:
            finish_reason = "tool_calls" if response.get("tool_calls") else "stop"
            message = types.ResponseMessage(**response, finish_reason=finish_reason, is_truncated=False)
            return types.Response(id="completion", created=int(time.time()), model="policy", message=message)

        async def close(self) -> None:
            return None

    return Policy


class FailedRewards(logging.Handler):
    """Log handler that records reward functions that raise, which verifiers only logs and counts as 0."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Error calling reward function") and (trajectory := TRAJECTORY.get(None)):
            trajectory.failed_rewards.append(message)
